"""Generated cases: valid, deep, within the limits of what they run on, and the same from the same chance."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from isolate import case as cases_of
from isolate.case import (
    Case,
    Checkpoint,
    Decode,
    Expect,
    Load,
    Model,
    Reopen,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqRm,
    Step,
)
from isolate.errors import IsolateError
from isolate.fault import Call, Fault, Signature, StepInFlight
from isolate.recipes import Recipe
from isolate.replay.reference import Slot
from isolate.replay.supervisor import Supervisor
from isolate.search import fuzz, serving
from isolate.search.coverage import facts
from isolate.search.followed import Followed as AsKnown
from isolate.search.fuzz import CELLS, Space, cases, changed, generated, ground, hostile
from isolate.search.hostile import accepted
from isolate.search.known import Known, name_of, recognized, shipped
from isolate.search.serving import MOST_STEPS
from isolate.search.shard import other_rules
from isolate.serve.memory import Memory
from isolate.serve.options import Options, ServeError
from isolate.serve.requests import Request
from isolate.serve.slots import Server
from isolate.zoo import ZOO

SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=60, deadline=None)


def case_of(seed: int, way: fuzz.Way = "free", space: Space = Space()) -> Case:  # noqa: B008
    chance = Random(seed)
    return generated(chance, ground(chance, space), space, way)


def recipe_of(case: Case) -> Recipe:
    return ZOO[str(case.model.zoo)]


# -- as a user would use them


@pytest.fixture(scope="module")
def children() -> Iterator[Supervisor]:
    with Supervisor() as running:
        yield running


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(slots=3, memory="hybrid", steps=(4, 8)))
def test_generated_cases_run_on_the_library(children: Supervisor, case: Case) -> None:
    """What goes wrong in them, if anything, is a finding, not a refusal."""
    assert case.context.n_seq_max == 3 and recipe_of(case).memory == "hybrid"
    outcome = children.run(case)
    assert outcome.fault is None or recognized(shipped(), case, outcome.fault) or outcome.steps > 0


def test_the_build_makes_a_context_of_every_ground(children: Supervisor) -> None:
    grounds = [ground(Random(seed), Space(snapshots=True)) for seed in range(400)]
    for one in {(g.model, g.context.type_k, g.context.type_v, g.context.flash_attn_type): g for g in grounds}.values():
        children.run(replace(fuzz.case_of(one, [Decode([Run(0, [1, 2, 3])])]), check=[]))


@given(case=cases(model="llama", slots=2))
@settings(max_examples=20, deadline=None)
def test_a_model_and_slots_can_be_asked_for(case: Case) -> None:
    assert case.model.zoo == "llama" and case.context.n_seq_max == 2


def test_a_space_with_nothing_in_it_is_refused() -> None:
    with pytest.raises(IsolateError, match=r"no zoo model is called 'lama'; there are .*llama"):
        case_of(0, space=Space(models=("lama",)))
    with pytest.raises(IsolateError, match="none of the models llama has hybrid memory"):
        case_of(0, space=Space(models=("llama",), memory="hybrid"))


# -- what every case must be


def valid(case: Case) -> Case:
    """The case, read like a file."""
    again = cases_of.parse(msgspec.json.encode(case), "generated")
    assert again == case and msgspec.json.encode(again) == msgspec.json.encode(case)
    return again


@FEW
@given(seed=SEEDS, way=st.sampled_from(["free", "served"]))
def test_a_case_is_a_valid_file_and_the_same_for_the_same_chance(seed: int, way: fuzz.Way) -> None:
    assert valid(case_of(seed, way)) == case_of(seed, way)


@FEW
@given(seed=SEEDS)
def test_a_hostile_case_is_a_valid_file_and_says_that_it_is_hostile(seed: int) -> None:
    made = []
    for _ in range(2):
        chance = Random(seed)
        made.append(hostile(chance, ground(chance, Space()), Space()))
    (case, wild), again = made
    assert valid(case).hostile and again == (case, wild)
    assert all(0 <= number < len(case.steps) for number in wild)


@FEW
@given(seed=SEEDS)
@example(seed=8606)  # the end of a slot that was moved, removed down to its first token
@example(seed=8058)  # a copied part that holds no token
def test_a_slot_that_was_emptied_starts_again_at_the_beginning(seed: int) -> None:
    """Where a token goes is told from the steps alone; a copy of a part onto a slot that is empty begins there."""
    case = case_of(seed)
    slots = AsKnown(recipe_of(case), case.context)
    for step in case.steps:
        slots.add(step)
        assert all(slots.ends.get(slot, 0) == 0 for slot in slots.slots if slots.held(slot) == Slot())


@FEW
@given(seed=SEEDS)
def test_a_changed_case_begins_as_the_other(seed: int) -> None:
    case = case_of(seed)
    if any(isinstance(step, Reopen) for step in case.steps):
        return
    other = valid(changed(Random(seed + 1), case, Space()))
    assert other == changed(Random(seed + 1), case, Space())
    assert other.steps[0] == case.steps[0] and other.model == case.model


class Followed:
    """A second look at what steps leave in slots, by token counts alone."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ends: dict[int, int] = {}
        self.taken: dict[str, tuple[int, int, bool]] = {}

    def step(self, step: Step) -> None:
        if isinstance(step, Decode):
            for run in step.batch:
                start = self.ends.get(run.slot, 0)
                assert run.at is UNSET or run.at == start, "positions are consecutive"
                if step.returns is UNSET:
                    self.ends[run.slot] = start + run.count()
        elif isinstance(step, Checkpoint | Save):
            partial = isinstance(step, Checkpoint) and recipe_of(self.case).memory in ("window", "hybrid")
            self.taken[step.name] = step.slot, self.ends.get(step.slot, 0), partial
        elif isinstance(step, Restore | Load):
            assert step.name in self.taken, "a state that was taken"
            slot, end, partial = self.taken[step.name]
            into = slot if step.slot is UNSET else int(step.slot)
            if partial and isinstance(step, Restore):
                assert into == slot and end <= self.ends.get(slot, 0), "the slot still holds what the checkpoint is of"
            self.ends[into] = end
        elif step.returns is UNSET or step.returns:  # type: ignore[union-attr]
            from isolate.steps import ends_after

            self.ends = ends_after(self.ends, step)
        if isinstance(step, Reopen):
            self.ends.clear()
            self.taken = {name: each for name, each in self.taken.items() if name.startswith("s")}


@FEW
@given(seed=SEEDS, way=st.sampled_from(["free", "served"]))
def test_no_step_oversteps_a_limit(seed: int, way: fuzz.Way) -> None:
    case = case_of(seed, way)
    context, recipe = case.context, recipe_of(case)
    per_slot = -(-context.n_ctx // context.n_seq_max // CELLS) * CELLS
    followed = Followed(case)
    for step in case.steps:
        slots = [run.slot for run in step.batch] if isinstance(step, Decode) else [getattr(step, "slot", 0)]
        assert all(slot is UNSET or -1 <= slot < context.n_seq_max for slot in slots)
        if isinstance(step, Decode):
            assert 0 < sum(run.count() for run in step.batch) <= context.n_batch
        if isinstance(step, SeqAdd):
            assert recipe.shift
        if isinstance(step, SeqRm) and step.p0 > 0 and not recipe.partial_removal and way == "free":
            # such memory says no, unless nothing is there to be removed
            assert step.returns is not UNSET or step.p0 >= followed.ends.get(step.slot, 0)
        if way == "free":
            followed.step(step)
            if not context.kv_unified and not any(isinstance(each, SeqAdd) for each in case.steps):
                assert all(end <= per_slot for end in followed.ends.values())


@pytest.mark.parametrize("seed", range(12))
def test_a_served_case_is_what_the_server_emits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same options and requests, as a table would give them, end in the same steps."""
    asked: list[tuple[Options, Memory, list[Request]]] = []

    def noted(options: Options, memory: Memory, requests: list[Request]) -> Server:
        asked.append((options, memory, requests))
        return Server(options, memory, requests)

    monkeypatch.setattr(serving, "Server", noted)
    case = case_of(seed, "served")
    options, memory, requests = asked[-1]
    steps: list[Step] = []
    with contextlib.suppress(ServeError):
        for step in Server(options.check("served"), memory, requests).steps():
            steps.append(step)
    assert case.steps == steps[:MOST_STEPS] and case.context == options.context()
    assert memory == Memory.of(recipe_of(case))


def test_a_server_of_a_case_makes_no_more_steps_than_it_may() -> None:
    assert max(len(case_of(seed, "served").steps) for seed in range(40)) <= MOST_STEPS


def test_cases_are_deep() -> None:
    """Half of 500 cases has this much in it, and what breaks servers is there."""
    made = [case_of(seed) for seed in range(500)]

    def median(*kinds: type) -> float:
        return statistics.median(sum(isinstance(step, kinds) for step in case.steps) for case in made)

    assert statistics.median(len(case.steps) for case in made) >= 20
    assert median(Decode) >= 7
    assert median(Restore, Load) >= 1
    assert median(Checkpoint, Save) >= 2
    states = [sum(isinstance(step, Restore | Load) for step in case.steps) for case in made]
    assert statistics.mean(states) >= 1.8 and sum(count >= 4 for count in states) > 75
    mixed = [
        step
        for case in made
        for step in case.steps
        if isinstance(step, Decode) and len(step.batch) > 1 and len({run.count() for run in step.batch}) > 1
    ]
    assert len(mixed) > 500
    assert len({case.model.zoo for case in made}) == len(ZOO)
    into_others = [
        step for case in made for step in case.steps if isinstance(step, Load) and step.slot is not UNSET
    ]  # fmt: skip
    assert len(into_others) > 100
    assert sum(isinstance(step, SeqCp) for case in made for step in case.steps) > 200


# -- hostile answers


def fault(kind: str, step: Step, index: int, where: str = "llama_decode", code: int | None = None) -> Fault:
    call = Call(where, code)
    return Fault(kind, Signature(kind, where, code, step.kind), StepInFlight(index, step.kind), call, call, "")


def test_a_step_that_oversteps_a_limit_may_be_refused_and_nothing_else() -> None:
    steps: list[Step] = [Decode(batch=[Run(0, [1])]), Decode(batch=[Run(7, [1])])]
    case = Case(isolate=1, model=Model(zoo="llama"), steps=steps, hostile=True)
    said = fault("decode", steps[1], 1, code=-1)
    answered = accepted(case, said, frozenset({1}))
    assert answered is not None and answered.steps[1] == replace(steps[1], returns=-1)
    # after a limit was overstepped a right step may be refused, too; before that it may not
    assert accepted(case, said, frozenset({0})) == answered
    assert accepted(case, fault("decode", steps[0], 0, code=-1), frozenset({1})) is None
    assert accepted(answered, said, frozenset({1})) is None
    assert accepted(case, fault("signal", steps[1], 1, code=6), frozenset({1})) is None


def test_a_refusal_is_not_reduced_to_one_that_is_right() -> None:
    def refused(*steps: Step, zoo: str = "mamba2", **context: object) -> Case:
        return written(*steps, zoo=zoo, **context)

    every_slot = refused(decode(0), SeqRm(slot=-1))
    said = fault("memory", every_slot.steps[-1], 1, code=0)
    # recurrent memory may refuse to give back a part
    assert other_rules(every_slot, refused(decode(0), SeqRm(slot=0, p0=1)), said)
    assert not other_rules(every_slot, refused(decode(0), SeqRm(slot=0, p0=3)), said)
    assert not other_rules(every_slot, refused(SeqRm(slot=-1)), said)
    assert not other_rules(every_slot, refused(decode(0), SeqRm(slot=0, p0=1), zoo="llama"), said)
    # but not what a snapshot holds
    taken_back = refused(decode(0), SeqRm(slot=0, p0=2), zoo="lfm2", n_rs_seq=2)
    assert not other_rules(taken_back, taken_back, said)
    assert other_rules(taken_back, refused(*taken_back.steps, zoo="lfm2"), said)
    assert other_rules(taken_back, refused(decode(0, 9), SeqRm(slot=0, p0=2), zoo="lfm2", n_rs_seq=2), said)
    assert other_rules(taken_back, refused(decode(0), decode(0), SeqRm(slot=0, p0=2), zoo="lfm2", n_rs_seq=2), said)
    assert other_rules(taken_back, refused(*taken_back.steps, n_rs_seq=2), said)
    # a refusal that did not come is one only where it had to
    unrefused = written(decode(0), SeqRm(slot=0, p0=1, returns=False), zoo="mamba2")
    assert not other_rules(unrefused, unrefused, said)
    for nothing in (
        written(decode(0), SeqRm(slot=0, p0=0, returns=False), zoo="mamba2"),
        written(decode(0), SeqRm(slot=0, p0=1, returns=False)),
        written(SeqRm(slot=0, p0=1, returns=False), zoo="mamba2"),
    ):
        assert other_rules(unrefused, nothing, said)
    full = written(decode(0, 300), Decode(batch=[Run(0, list(range(300)))], returns=1), n_ctx=512, kv_unified=True)
    room = fault("decode", full.steps[-1], 1, code=0)
    assert not other_rules(full, full, room)
    assert other_rules(full, replace(full, steps=full.steps[1:]), room)
    # beyond the limits a refusal is right, and a case has to stay beyond them
    beyond = replace(every_slot, hostile=True)
    assert other_rules(beyond, beyond, said)
    dies = fault("signal", every_slot.steps[-1], 1, code=11)
    assert other_rules(beyond, every_slot, dies) and not other_rules(beyond, beyond, dies)


# -- what is known


def written(*steps: Step, zoo: str = "llama", **context: object) -> Case:
    return Case(
        isolate=1, model=Model(zoo=zoo), steps=list(steps), context=cases_of.Context(n_seq_max=4, **context)
    )  # type: ignore[arg-type]  # fmt: skip


def decode(slot: int, count: int = 3) -> Decode:
    return Decode(batch=[Run(slot, list(range(count)))])


def known_of(case: Case, kind: str = "positions", where: str = "llama_memory_seq_pos_min/max") -> list[Known]:
    expect = Expect(kind=kind, step=case.steps[-1].kind, where=where)
    return [Known("it", replace(case, expect=expect))]


def shown(case: Case, kind: str = "positions", where: str = "llama_memory_seq_pos_min/max") -> Fault:
    return fault(kind, case.steps[-1], len(case.steps) - 1, where)


KNOWN = written(decode(0), Save(slot=0, name="a"), SeqAdd(slot=0, delta=2), Load(name="a", slot=1))


def test_a_known_finding_is_recognized_in_other_slots_names_and_counts_and_among_other_steps() -> None:
    other = written(
        decode(1), decode(3, 70), decode(0), Save(slot=3, name="x"), Save(slot=0, name="y"),
        SeqAdd(slot=3, delta=9), SeqRm(slot=0), Load(name="x", slot=2),
    )  # fmt: skip
    assert recognized(known_of(KNOWN), other, shown(other)) is not None


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((SeqAdd(slot=0, delta=2), decode(0), Save(slot=0, name="a"), Load(name="a", slot=1)), id="order"),
        pytest.param((decode(0), Save(slot=0, name="a"), SeqAdd(slot=2, delta=2), Load(name="a", slot=1)), id="slot"),
        pytest.param((decode(0), Save(slot=0, name="a"), Load(name="a", slot=1)), id="without a step"),
        pytest.param(
            (decode(0), Save(slot=0, name="a"), SeqAdd(slot=0, delta=2), Save(slot=0, name="b"), Load(name="b", slot=1)),
            id="another state",
        ),
        pytest.param(
            (decode(0), Save(slot=0, name="a"), SeqRm(slot=0, p0=2), Load(name="a", slot=1)), id="another step"
        ),
    ],
)  # fmt: skip
def test_a_case_that_only_looks_alike_is_new(steps: tuple[Step, ...]) -> None:
    other = written(*steps)
    assert recognized(known_of(KNOWN), other, shown(other)) is None


def test_a_reduced_case_is_known_by_its_heart() -> None:
    """What gave the slots their tokens, and what noticed the fault in the end, may be another."""
    known = known_of(written(decode(0), SeqCp(slot=0, into=1), SeqAdd(slot=0, delta=3), kv_unified=True))
    case = written(
        Save(slot=2, name="a"),
        Load(name="a", slot=3),
        SeqCp(slot=3, into=0),
        SeqAdd(slot=3, delta=1),
        decode(0),
        kv_unified=True,
    )
    found = shown(case, "logits", "llama_get_logits_ith")
    assert recognized(known, case, found, reduced=True) and not recognized(known, case, found)
    assert not recognized(known, case, shown(case, "signal", "llama_decode"), reduced=True)
    apart = replace(case, context=replace(case.context, kv_unified=False))
    assert not recognized(known, apart, found, reduced=True)
    assert not recognized(known, replace(case, steps=case.steps[:3]), found, reduced=True)


def test_any_quantized_cache_is_like_another_on_its_way_to_the_device() -> None:
    def away(type_v: str, *between: Step) -> Case:
        point = Checkpoint(slot=0, name="p", flags=["partial_only", "on_device"])
        return written(decode(0), point, *between, Restore(name="p"), decode(0), type_v=type_v)

    known = known_of(away("q8_0", SeqRm(slot=0, p0=2)), "logits", "llama_get_logits_ith")
    for type_v, is_known in (("q4_0", True), ("f16", False)):
        case = away(type_v, SeqAdd(slot=0, delta=1))
        found = shown(case, "logits", "llama_get_logits_ith")
        assert (recognized(known, case, found, reduced=True) is not None) == is_known


def test_an_empty_slots_state_is_not_that_of_another() -> None:
    known = known_of(written(Save(slot=0, name="a"), decode(0), Load(name="a", slot=0)))
    full = written(decode(0), Save(slot=0, name="a"), decode(0), Load(name="a", slot=0))
    assert not recognized(known, full, shown(full), reduced=True)


def test_a_slot_that_comes_twice_in_a_known_batch_need_not_in_another() -> None:
    twice = Decode(batch=[Run(slot, [1]) for slot in (0, 1, 0)])
    known = known_of(written(twice, SeqRm(slot=1), decode(0)), "logits", "llama_get_logits_ith")
    once = written(Decode(batch=[Run(1, [1]), Run(0, [1])]), SeqRm(slot=0), decode(1))
    assert recognized(known, once, shown(once, "logits", "llama_get_logits_ith")) is not None


def test_settings_that_a_context_was_made_again_with_count() -> None:
    unified = replace(KNOWN, context=replace(KNOWN.context, kv_unified=True))
    later = replace(KNOWN, steps=[Reopen(context=unified.context), *KNOWN.steps])
    assert recognized(known_of(unified), later, shown(later)) is not None


def test_what_recurrent_layers_do_is_no_finding_of_a_window_and_without_snapshots_none_of_theirs() -> None:
    said = "logits", "llama_get_logits_ith"
    window = known_of(written(decode(0), SeqRm(slot=1), decode(0), zoo="gpt-oss"), *said)
    for zoo, is_known in (("gemma3", True), ("mamba2", False), ("lfm2", False), ("llama", False)):
        other = written(decode(0), SeqRm(slot=1), decode(0), zoo=zoo)
        assert (recognized(window, other, shown(other, *said)) is not None) == is_known
    snapshots = known_of(written(decode(0), SeqRm(slot=0, p0=1), decode(0), zoo="lfm2", n_rs_seq=1), *said)
    for settings_, is_known in (({"n_rs_seq": 2}, True), ({}, False)):
        other = written(decode(0), SeqRm(slot=0, p0=1), decode(0), zoo="lfm2", **settings_)
        assert (recognized(snapshots, other, shown(other, *said)) is not None) == is_known


def test_a_slow_path_is_one_of_every_memory() -> None:
    pair = Decode(batch=[Run(0, [1]), Run(1, [1])]), Decode(batch=[Run(1, [1]), Run(0, [1])])
    known = known_of(written(*pair), "slow", "ubatches")
    other = written(*pair, zoo="mamba2")
    assert recognized(known, other, shown(other, "slow", "ubatches")) is not None


def test_a_slot_that_a_state_was_set_back_into_is_not_empty() -> None:
    known = known_of(written(Save(slot=0, name="a"), decode(0), Load(name="a", slot=0)))
    back = Checkpoint(slot=0, name="p", flags=[]), SeqRm(slot=0), Restore(name="p")
    full = written(decode(0), *back, Save(slot=0, name="a"), decode(0), Load(name="a", slot=0))
    assert recognized(known, full, shown(full)) is None


def test_a_death_at_the_same_place_with_the_same_states_is_the_same_once_it_is_reduced() -> None:
    def taken(*between: Step) -> Case:
        first, second = (Checkpoint(slot=0, name=name, flags=["partial_only", "on_device"]) for name in "ab")
        return written(decode(0), first, *between, second)

    known = known_of(taken(SeqRm(slot=0, p0=2)), "assert", "no room")
    other = taken(SeqAdd(slot=0, delta=1), decode(1))
    assert recognized(known, other, shown(other, "assert", "file.c:3: no room"), reduced=True) is not None
    assert recognized(known, other, shown(other, "assert", "file.c:3: no room")) is None
    assert recognized(known, other, shown(other, "assert", "elsewhere"), reduced=True) is None
    once = written(decode(0), other.steps[1])
    assert recognized(known, once, shown(once, "assert", "no room"), reduced=True) is None


def test_when_an_empty_slots_state_is_taken_does_not_matter() -> None:
    known = known_of(written(Save(slot=0, name="a"), decode(1), Load(name="a", slot=1)))
    later = written(decode(1), Save(slot=0, name="a"), Load(name="a", slot=1))
    assert recognized(known, later, shown(later)) is not None
    other = written(decode(0), Save(slot=1, name="a"), Load(name="a", slot=0))
    assert recognized(known, other, shown(other)) is not None
    full = written(decode(1), Save(slot=1, name="a"), Load(name="a", slot=1))
    assert recognized(known, full, shown(full)) is None


def test_another_fault_or_another_step_is_new() -> None:
    assert recognized(known_of(KNOWN), KNOWN, shown(KNOWN)) is not None
    assert recognized(known_of(KNOWN), KNOWN, shown(KNOWN, kind="assert")) is None
    assert recognized(known_of(KNOWN), KNOWN, shown(KNOWN, where="elsewhere")) is None
    early = replace(KNOWN, steps=[*KNOWN.steps, SeqRm(slot=0)])
    assert (
        recognized(known_of(KNOWN), early, fault("positions", SeqRm(slot=0), 4, "llama_memory_seq_pos_min/max")) is None
    )


def test_settings_that_a_known_finding_needs_must_be_there() -> None:
    unified = replace(KNOWN, context=replace(KNOWN.context, kv_unified=True))
    assert recognized(known_of(unified), KNOWN, shown(KNOWN)) is None
    quantized = replace(KNOWN, context=replace(KNOWN.context, type_k="q8_0"))
    assert recognized(known_of(quantized), KNOWN, shown(KNOWN)) is None
    wider = replace(KNOWN, context=replace(KNOWN.context, n_ubatch=8, n_batch=16, type_k="q8_0"))
    assert recognized(known_of(KNOWN), wider, shown(wider)) is not None


def test_a_finding_of_plain_memory_is_one_of_memory_that_contains_it_and_not_the_other_way_round() -> None:
    hybrid = replace(KNOWN, model=Model(zoo=next(name for name, each in ZOO.items() if each.memory == "hybrid")))
    assert recognized(known_of(KNOWN), hybrid, shown(hybrid)) is not None
    assert recognized(known_of(hybrid), KNOWN, shown(KNOWN)) is None


def test_each_shipped_finding_is_recognized_as_itself_and_has_a_name_of_its_own() -> None:
    known = shipped()
    assert len(known) > 20
    for each in known:
        last = each.case.steps[-1]
        said = fault(each.expect.kind, last, len(each.case.steps) - 1, each.expect.where)
        if each.expect.step == last.kind:
            assert recognized([each], each.case, said) == each
    assert len({name_of(each.case) for each in known}) == len(known)


# -- what was tried


def test_facts_are_of_the_steps_that_were_run() -> None:
    case = written(decode(0), SeqRm(slot=0, p0=1), decode(1))
    assert facts(case, 0) == set()
    assert facts(case, 1) < facts(case, 2) < facts(case, 3)
    assert any(fact[:4] == ("follows", "decode 1", "seq_rm from", "same") for fact in facts(case, 2))
    assert any(fact[:4] == ("follows", "seq_rm from", "decode 1", "other") for fact in facts(case, 3))


@FEW
@given(seed=SEEDS)
def test_facts_are_few_and_do_not_depend_on_which_slot_it_is(seed: int) -> None:
    case = case_of(seed, space=Space(slots=2))
    other = msgspec.convert(_swapped(msgspec.to_builtins(case)), Case)
    assert facts(case, len(case.steps)) == facts(other, len(case.steps))
    assert len(facts(case, len(case.steps))) <= 8 * len(case.steps)


def _swapped(data: object) -> object:
    """The same with slots 0 and 1 the other way round."""
    if isinstance(data, dict):
        return {
            key: 1 - value if key in ("slot", "into") and value in (0, 1) else _swapped(value)
            for key, value in data.items()
        }
    return [_swapped(each) for each in data] if isinstance(data, list) else data
