"""Each oracle fires at real wrong behaviour, names the slot and the position, and stays silent where all is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isolate.case import (
    CHECKS,
    Case,
    Checkpoint,
    Clear,
    Context,
    Decode,
    Load,
    Model,
    Pattern,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqRm,
    Step,
)
from isolate.fault import Fault
from isolate.replay.supervisor import Outcome, Supervisor
from isolate.replay.target import Target
from isolate.zoo import ZOO
from tests.conftest import ROOT, TESTS

F32 = Context(n_ctx=1024, n_batch=256, n_ubatch=64, n_seq_max=2, type_k="f32", type_v="f32", flash_attn_type="disabled")
Q8_0 = Context(
    n_ctx=1024, n_batch=256, n_ubatch=64, n_seq_max=2, type_k="q8_0", type_v="q8_0", flash_attn_type="enabled"
)
#: two prompts of 60 tokens, then one token each
PROMPTS = Decode(batch=[Run(slot, Pattern(60, 120, 13 * slot, 7)) for slot in (0, 1)])
ANSWER = Decode(batch=[Run(0, [1]), Run(1, [2])])
ATTENTION = [name for name, recipe in ZOO.items() if recipe.memory == "attention"]
SHIFTABLE = [name for name, recipe in ZOO.items() if recipe.shift and recipe.memory != "recurrent"]


def case(zoo: str, *steps: Step, context: Context = F32) -> Case:
    return Case(isolate=1, model=Model(zoo=zoo, type="F32", seed=1), context=context, steps=list(steps))


@pytest.fixture(scope="module")
def right() -> Iterator[Supervisor]:
    """A child with the shipped library as it is."""
    with Supervisor() as children:
        yield children


def wrong(
    what: str, zoo: str, *steps: Step, at: int = 1, check: tuple[str, ...] = CHECKS, context: Context = F32
) -> Outcome:
    """What a run gives where the library does something wrong just before step `at`."""
    environment = {"WRONG": f"{what}@{at}", "PYTHONPATH": f"{TESTS}:{ROOT}"}
    with Supervisor(target=Target("cpu", 0, environment=environment), worker="wrong_worker") as children:
        return children.run(case(zoo, *steps, context=context), check)  # type: ignore[arg-type]


def fault_of(outcome: Outcome) -> Fault:
    assert outcome.fault is not None
    return outcome.fault


@pytest.mark.parametrize("zoo", ["llama", "qwen35moe", "mamba2", "gemma3", "lfm2", "deepseek2"])
def test_a_state_in_the_wrong_slot(zoo: str) -> None:
    fault = fault_of(wrong("swap", zoo, PROMPTS, ANSWER))
    assert (fault.kind, fault.step.index, fault.step.kind) == ("logits", 1, "decode")
    assert (fault.evidence["slot"], fault.evidence["position"]) == (0, 60)
    assert "slot 0, position 60" in fault.explanation
    assert fault.evidence["times_the_signal"] > 0.1
    assert fault.evidence["times_the_noise"] > 100
    assert fault.signature.where == "llama_get_logits_ith"


@pytest.mark.parametrize("zoo", ["qwen35moe", "lfm2", "falcon-h1", "gemma3", "gpt-oss"])
def test_half_a_state_in_the_wrong_slot(zoo: str) -> None:
    fault = fault_of(wrong("half", zoo, PROMPTS, ANSWER))
    assert (fault.kind, fault.step.index, fault.evidence["slot"]) == ("logits", 1, 0)


@pytest.mark.parametrize("zoo", [*ATTENTION, "qwen35moe", "gemma3"])
def test_one_lost_cell_of_sixty(zoo: str) -> None:
    fault = fault_of(wrong("hole", zoo, PROMPTS, ANSWER))
    assert (fault.kind, fault.evidence["slot"], fault.evidence["position"]) == ("logits", 0, 60)


@pytest.mark.parametrize("zoo", [*ATTENTION, "lfm2"])
def test_lost_cells_of_a_quantized_cache(zoo: str) -> None:
    fault = fault_of(wrong("gap", zoo, PROMPTS, ANSWER, context=Q8_0))
    assert (fault.kind, fault.evidence["slot"], fault.evidence["position"]) == ("logits", 0, 60)


@pytest.mark.parametrize("zoo", SHIFTABLE)
def test_keys_that_were_not_turned(zoo: str) -> None:
    fault = fault_of(wrong("turn", zoo, PROMPTS, ANSWER))
    assert (fault.kind, fault.evidence["slot"]) == ("logits", 0)


@pytest.mark.parametrize(("what", "zoo"), [("all", "mamba2"), ("all", "gemma3"), ("move", "llama"), ("move", "lfm2")])
def test_positions_behind_the_back(what: str, zoo: str) -> None:
    # a step that itself leaves positions alone: what is seen is what was done to them
    fault = fault_of(wrong(what, zoo, PROMPTS, SeqRm(slot=1), at=1, check=("positions",)))
    assert (fault.kind, fault.step.index, fault.evidence["slot"]) == ("positions", 1, 0)
    assert fault.evidence["memory"] == ZOO[zoo].memory
    assert "slot 0: oldest and newest position are" in fault.explanation


def test_the_newest_cell_lost_is_seen_before_a_decode() -> None:
    fault = fault_of(wrong("tail", "llama", PROMPTS, SeqRm(slot=1), check=("positions",)))
    assert (fault.evidence["newest"], fault.evidence["expected"]) == (58, "0 and 59")


@pytest.mark.parametrize("zoo", ["llama", "mamba", "deepseek2"])
def test_not_a_number(zoo: str) -> None:
    fault = fault_of(wrong("poison", zoo, PROMPTS, ANSWER, check=("nan",)))
    assert (fault.kind, fault.evidence["slot"], fault.evidence["position"]) == ("nan", 0, 60)
    assert fault_of(wrong("poison", zoo, PROMPTS, ANSWER, check=("logits",))).kind == "logits"


@pytest.mark.parametrize("zoo", ["llama", "gpt-oss", "qwen2vl", "deepseek2", "qwen35moe"])
@pytest.mark.parametrize("via", ["memory", "file"])
def test_a_state_that_loses_a_cell(zoo: str, via: str) -> None:
    save = Save(slot=0, name="whole", via=via)  # type: ignore[arg-type]
    kept = fault_of(wrong("lossy", zoo, PROMPTS, save, at=1, check=("cells",)))
    assert (kept.kind, kept.step.index, kept.evidence["slot"]) == ("cells", 1, 0)
    assert 3 in kept.evidence["positions"]
    assert 3 not in kept.evidence["positions_again"]


def test_a_load_that_loses_a_cell() -> None:
    steps = PROMPTS, Save(slot=0, name="whole"), SeqRm(slot=1), Load(name="whole", slot=1)
    fault = fault_of(wrong("lossy", "llama", *steps, at=3, check=("cells",)))
    assert (fault.kind, fault.step.index, fault.evidence["slot"]) == ("cells", 3, 1)
    assert set(fault.evidence["positions"]) - set(fault.evidence["positions_again"]) == {3}


def test_what_is_not_asked_for_is_not_checked() -> None:
    assert wrong("swap", "llama", PROMPTS, ANSWER, check=("positions", "nan", "cells")).fault is None
    assert wrong("poison", "llama", PROMPTS, ANSWER, check=("positions",)).fault is None


def test_noise_that_is_not_apart_from_signal_is_said() -> None:
    outcome = wrong("noisy", "llama", PROMPTS, ANSWER)
    assert outcome.fault is None
    assert [
        note for note in outcome.notes if "logits: nothing was judged" in note and "rounding changes them by" in note
    ]


def serving(zoo: str) -> list[Step]:
    """What a server does with this kind of memory, all of it right in the shipped library."""
    recipe = ZOO[zoo]
    back = SeqRm(slot=0, p0=60)
    again = [Restore(name="prompt"), back] if not recipe.partial_removal else [back, Restore(name="prompt")]
    steps: list[Step] = [
        PROMPTS,
        Checkpoint(slot=0, name="prompt"),
        ANSWER,
        Decode(batch=[Run(0, [5, 6, 7, 8, 9], "all"), Run(1, [3])]),
        *again,
        ANSWER,
        Save(slot=0, name="whole"),
        SeqRm(slot=1),
        Load(name="whole", slot=1),
        Decode(batch=[Run(1, [4, 5, 6], "all"), Run(0, [9])]),
        Save(slot=1, name="file", via="file"),
        SeqRm(slot=0),
        SeqCp(slot=1, into=0),
        Decode(batch=[Run(0, [11, 12]), Run(1, [13])]),
        Clear(),
        Load(name="file", slot=0),
        Decode(batch=[Run(0, [14, 15, 16], "all")]),
    ]
    if recipe.shift:
        steps += [SeqAdd(slot=0, delta=9), Decode(batch=[Run(0, [17])]), Decode(batch=[Run(0, [18, 19], "all")])]
    if recipe.memory == "attention":
        steps += [SeqRm(slot=0, p0=60), Decode(batch=[Run(0, [3, 4], "all")]), SeqRm(slot=0, p0=20, p1=30)]
        steps += [Decode(batch=[Run(0, [5, 6], "all")])]
        if recipe.shift:
            steps += [SeqAdd(slot=0, p0=30, delta=-10), Decode(batch=[Run(0, [7])]), Decode(batch=[Run(0, [8])])]
    return steps


@pytest.mark.parametrize("context", [F32, Q8_0], ids=["f32", "q8_0"])
@pytest.mark.parametrize("zoo", ZOO)
def test_silent_where_all_is_right(zoo: str, context: Context, right: Supervisor) -> None:
    steps = serving(zoo)
    if zoo == "deepseek2" and context is Q8_0:
        # the shipped library aborts when it turns quantized keys of this model
        steps = [step for step in steps if not isinstance(step, SeqAdd)]
    outcome = right.run(case(zoo, *steps, context=context), CHECKS)
    assert outcome.fault is None, outcome.fault.explanation
    assert outcome.notes == ()


@pytest.mark.parametrize("zoo", ["llama", "gemma3", "qwen35moe", "mamba2"])
def test_silent_on_quantized_weights_and_a_unified_cache(zoo: str, right: Supervisor) -> None:
    context = Context(n_ctx=2048, n_batch=256, n_ubatch=64, n_seq_max=2, kv_unified=True)
    steps = [step for step in serving(zoo) if not isinstance(step, SeqAdd)]
    asked = case(zoo, *steps, context=context)
    outcome = right.run(
        Case(isolate=1, model=Model(zoo=zoo, type="Q3_K", seed=1), context=context, steps=asked.steps), CHECKS
    )
    assert outcome.fault is None, outcome.fault.explanation


def test_a_save_before_the_shift_is_done(right: Supervisor) -> None:
    """Wrong in the shipped library: the keys of the saved state are still where they were."""
    steps = PROMPTS, SeqAdd(slot=0, delta=7), Save(slot=0, name="moved"), SeqRm(slot=1), Load(name="moved", slot=1)
    outcome = right.run(case("llama", *steps, Decode(batch=[Run(1, [5])])), CHECKS)
    assert fault_of(outcome).kind == "logits"
    assert fault_of(outcome).evidence["slot"] == 1
    done = right.run(
        case("llama", PROMPTS, SeqAdd(slot=0, delta=7), ANSWER, *steps[2:], Decode(batch=[Run(1, [5])])), CHECKS
    )
    assert done.fault is None


def test_slots_that_cannot_be_judged_are_named(right: Supervisor) -> None:
    steps = PROMPTS, SeqCp(slot=0, into=1), Decode(batch=[Run(1, [5], at=60)])
    context = Context(n_ctx=1024, n_batch=256, n_seq_max=2, type_k="f32", type_v="f32", kv_unified=True)
    outcome = right.run(case("llama", *steps, context=context), CHECKS)
    assert outcome.fault is None
    assert any("slot 1 was not judged: a slot was copied into one that was not empty" in note for note in outcome.notes)
