"""What a run uses: the kernels it launched, and leaks and slow paths where there are some, and only there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import log2, prod
from pathlib import Path
from random import Random

import msgspec
import pytest

from isolate import case as cases
from isolate.case import (
    Case,
    Check,
    Checkpoint,
    Context,
    Decode,
    Model,
    Pattern,
    Reopen,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqRm,
    Step,
)
from isolate.fault import Fault
from isolate.replay import series
from isolate.replay.series import Fill, Sample, repeated
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from isolate.trace.launch import kernel_name, kernels_seen
from isolate.trace.record import Kind, LaunchDetail
from isolate.trace.ring import Ring
from isolate.zoo import ZOO
from tests import cuda_builds
from tests.conftest import ROOT
from tests.gpu.client import needs_gpu

CASES = ROOT / "cases"
R21 = cases.read(CASES / "cuda" / "r21-gap-between-busy-slots.json")
REFUSED = cases.read(CASES / "moe-small-batch.json")
CHECK: tuple[Check, ...] = ("counters",)


@pytest.fixture(scope="module")
def cuda_build() -> str:
    return str(cuda_builds.ptx80())


def h200(build: str, trace: Path | None = None) -> Supervisor:
    return Supervisor(build, target=find("dry:h200", build), trace=trace)


@pytest.fixture(scope="module")
def right() -> Iterator[Supervisor]:
    with Supervisor() as children:
        yield children


@pytest.fixture(scope="module", params=[pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]), "dry:h200"])
def gpu(request: pytest.FixtureRequest, cuda_build: str) -> Iterator[Supervisor]:
    with Supervisor(cuda_build, target=find(request.param, cuda_build)) as children:
        yield children


@pytest.fixture(scope="module")
def leaking_cells() -> Iterator[Supervisor]:
    with leaking("cell", "restore") as children:
        yield children


# -- kernels


@pytest.mark.parametrize(("case", "fault"), [(R21, None), (REFUSED, "cuda")])
def test_the_kernels_of_a_run_are_known_whether_its_child_lives_or_not(
    case: Case, fault: str | None, cuda_build: str, tmp_path: Path
) -> None:
    case = msgspec.structs.replace(case, check=[])
    with h200(cuda_build, tmp_path / "trace") as children:
        found = children.run(case).fault
        assert (found.kind if found else None) == fault
        seen = children.seen()
    with Ring(tmp_path / "trace") as ring:
        records = list(ring.records())
        assert kernels_seen(ring) == seen
    launches = [record for record in records if record.kind == Kind.LAUNCH]
    assert len(launches) > 30
    blocks = {
        (kernel_name(record.name), int(log2(prod(record.detail.grid))))
        for record in launches
        if isinstance(record.detail, LaunchDetail)
    }
    assert seen == blocks


def test_each_run_has_its_own_kernels_and_a_target_without_hooks_none(cuda_build: str, right: Supervisor) -> None:
    with h200(cuda_build) as children:
        assert children.seen() == frozenset()
        assert children.run(R21).fault is not None
        some = children.seen()
        assert children.run(REFUSED).fault is not None
        others = children.seen()
        assert some - others and others - some
    right.run(R21)
    assert right.seen() == frozenset()


# -- leaks

F32 = Context(
    n_ctx=768, n_batch=256, n_ubatch=64, n_seq_max=3, type_k="f32", type_v="f32",
    flash_attn_type="disabled", kv_unified=True,
)  # fmt: skip


def case(zoo: str, *steps: Step, context: Context = F32) -> Case:
    return Case(isolate=1, model=Model(zoo=zoo), context=context, steps=list(steps))


def rounds(count: int) -> list[Step]:
    """Prompts, then rounds of what a server does: tokens, the slot emptied, its checkpoint set back."""
    prompt = [Run(slot, Pattern(20, 120, 3 + slot, 7)) for slot in (0, 1)]
    turn: list[Step] = [
        Decode(batch=[Run(0, [5]), Run(1, [6])]),
        Decode(batch=[Run(0, Pattern(6, 120))]),
        SeqRm(slot=0),
        SeqRm(slot=1),
        Restore(name="first"),
        Restore(name="second"),
    ]
    taken = [Checkpoint(slot=0, name="first", flags=[]), Checkpoint(slot=1, name="second", flags=[])]
    return [Decode(batch=prompt), *taken, *(turn * count)]


def leaking(what: str, kind: str, build: str | None = None) -> Supervisor:
    target = find("dry:h200", build) if build else find("cpu")
    return Supervisor(
        build,
        target=replace(target, environment={**target.environment, "LEAK": f"{what}@{kind}"}),
        worker="tests.leaking_worker",
    )


def leak(children: Supervisor, steps: Sequence[Step], zoo: str = "llama") -> Fault:
    fault = children.run(case(zoo, *steps), CHECK).fault
    assert fault is not None and (fault.kind, fault.signature.kind) == ("leak", "leak")
    return fault


def test_a_cell_that_each_restore_leaves_behind_is_a_leak_of_the_restore(leaking_cells: Supervisor) -> None:
    fault = leak(leaking_cells, rounds(8))
    assert (fault.signature.where, fault.signature.step, fault.step.kind) == ("state bytes", "restore", "restore")
    assert "(2 cells) a round" in fault.explanation
    grown = [later - earlier for earlier, later in pairwise(fault.evidence["after_each_round"]["state bytes"])]
    assert len(grown) >= 5 and len(set(grown)) == 1
    # what led there is enough to see it again
    assert fault.step.index is not None
    assert leak(leaking_cells, rounds(8)[: fault.step.index + 1]).signature == fault.signature
    leak(leaking_cells, rounds(4))
    assert leaking_cells.run(case("llama", *rounds(3)), CHECK).fault is None


def test_the_step_that_leaks_is_named_though_others_add_more() -> None:
    with leaking("cell", "seq_rm") as children:
        assert leak(children, rounds(6)).signature.step == "seq_rm"


@pytest.mark.parametrize("zoo", [name for name, recipe in ZOO.items() if recipe.memory != "recurrent"])
def test_a_leaked_cell_is_found_in_every_memory_that_has_cells(zoo: str, leaking_cells: Supervisor) -> None:
    assert leak(leaking_cells, rounds(5), zoo).signature.where == "state bytes"


def test_a_cuda_allocation_that_each_restore_leaves_behind_is_a_leak(cuda_build: str) -> None:
    with leaking("allocation", "restore", cuda_build) as children:
        fault = leak(children, rounds(6))
    assert (fault.signature.where, fault.signature.step) == ("allocations", "restore")
    series = fault.evidence["after_each_round"]
    assert [later - earlier for earlier, later in pairwise(series["allocations"])] == [2] * 3
    assert [later - earlier for earlier, later in pairwise(series["allocated bytes"])] == [2000] * 3
    # whole pages on the device
    assert all(earlier <= later for earlier, later in pairwise(series["device bytes"]))


def test_a_cuda_graph_that_is_kept_is_a_leak(cuda_build: str) -> None:
    with leaking("graph", "restore", cuda_build) as children:
        assert leak(children, rounds(6)).signature.where == "CUDA graphs"


def test_memory_of_the_process_that_is_kept_is_a_leak_once_it_is_much() -> None:
    with leaking("memory", "checkpoint") as children:
        many: list[Step] = [Decode(batch=[Run(0, [1])]), *[Checkpoint(slot=0, name="it", flags=[])] * 30]
        fault = leak(children, many)
        assert (fault.signature.where, fault.signature.step) == ("resident bytes", "checkpoint")
        assert children.run(case("llama", *many[:6]), CHECK).fault is None


def test_what_should_grow_is_no_leak(right: Supervisor) -> None:
    answers: list[Step] = [Decode(batch=[Run(0, [5]), Run(1, [6])])] * 60
    kept: list[Step] = [Checkpoint(slot=0, name=f"at-{number}", flags=[]) for number in range(40)]
    for steps in (answers, [*answers[:3], *kept]):
        assert right.run(case("llama", *steps), CHECK).fault is None


def test_a_window_that_fills_up_again_is_no_leak(right: Supervisor) -> None:
    refill = [[Decode(batch=[Run(0, [1])]), SeqRm(slot=0, p0=at, p1=at + 1)] for at in range(6)]
    start: list[Step] = [Decode(batch=[Run(0, Pattern(100, 120))]), SeqRm(slot=0, p0=50, p1=88)]
    small = msgspec.structs.replace(F32, swa_full=False)
    outcome = right.run(case("gpt-oss", *start, *(step for each in refill for step in each), context=small), CHECK)
    assert outcome.fault is None, outcome.fault


@pytest.mark.parametrize("zoo", ZOO)
def test_forty_equal_rounds_show_nothing_on_a_right_library(zoo: str, right: Supervisor) -> None:
    outcome = right.run(case(zoo, *rounds(40)), CHECK)
    assert outcome.fault is None, outcome.fault


@pytest.mark.parametrize("zoo", ["llama", "qwen35moe"])
def test_forty_equal_rounds_show_nothing_on_a_gpu(zoo: str, gpu: Supervisor) -> None:
    outcome = gpu.run(case(zoo, *rounds(40)), CHECK)
    assert outcome.fault is None, outcome.fault


def test_contexts_made_anew_give_back_what_they_had(gpu: Supervisor) -> None:
    anew: list[Step] = [Reopen(context=F32), Decode(batch=[Run(0, Pattern(30, 120)), Run(1, [6])])]
    outcome = gpu.run(case("llama", *anew * 8), CHECK)
    assert outcome.fault is None, outcome.fault


# -- slow paths

TWO = [Run(0, [1]), Run(1, [2])]
PROMPTS = Decode(batch=[Run(slot, Pattern(8, 120, 13 * slot, 7)) for slot in range(3)])
STREAMS = msgspec.structs.replace(F32, kv_unified=False)


def test_a_free_slot_between_busy_ones_is_a_slow_path(right: Supervisor) -> None:
    for order in ([2, 3], [3, 2]):
        fault = right.run(msgspec.structs.replace(R21, steps=[R21.steps[0], *(R21.steps[at] for at in order)])).fault
        assert fault is not None and (fault.kind, fault.signature.where) == ("slow", "ubatches")
        # both are known only at the later one
        assert fault.step.index == 2
        assert "took 2 ubatches in slots 0, 2" in fault.explanation and "1 ubatch in slots 0, 1" in fault.explanation


def test_a_gpu_says_the_launches_too(gpu: Supervisor) -> None:
    fault = gpu.run(R21).fault
    assert fault is not None and fault.kind == "slow"
    told = (
        r"the same rows took 2 ubatches and (\d+) launches in slots 0, 2 .* 1 ubatch and (\d+) launches in slots 0, 1"
    )
    found = re.match(told, fault.explanation)
    assert found and int(found[1]) > 1.9 * int(found[2]) > 100, fault.explanation


@pytest.mark.parametrize(
    ("context", "others"),
    [
        # a unified cache has no gaps between slots
        (F32, [Decode(batch=[Run(0, [1]), Run(2, [2])])]),
        # more rows, and rows of other lengths, may take more
        (STREAMS, [Decode(batch=[Run(0, Pattern(100, 120)), Run(1, [2])]), Decode(batch=[Run(1, [1]), Run(2, [2])])]),
        # a shift is carried out by the next decode, on top of its own work
        (STREAMS, [SeqAdd(slot=1, delta=3), Decode(batch=[Run(1, [1]), Run(2, [2])])]),
    ],
)
def test_other_rows_and_pending_work_are_no_slow_path(context: Context, others: list[Step], right: Supervisor) -> None:
    outcome = right.run(case("llama", PROMPTS, Decode(batch=TWO), *others, context=context), CHECK)
    assert outcome.fault is None, outcome.fault


def test_a_context_with_smaller_ubatches_is_no_slow_path(right: Supervisor) -> None:
    once, again = (Decode(batch=[Run(slot, Pattern(100, 120))]) for slot in (0, 1))
    smaller = Reopen(context=msgspec.structs.replace(F32, n_ubatch=F32.n_ubatch // 4))
    assert right.run(case("llama", once, smaller, again), CHECK).fault is None


# -- the judgement, on invented counts


def sample(
    index: int,
    step: Step,
    fill: Sequence[int] = (20, 20),
    work: int = 1,
    graph: int = 0,
    held: dict[str, int] | None = None,
) -> Sample:
    counts = {"ubatches": 1, "launches": work, "graph launches": graph}
    return Sample(index, step, Fill(tuple(fill), (), 0), counts, held or {})


def climbing(name: str, values: Sequence[int]) -> Fault | None:
    return series.fault(
        [sample(index, Save(slot=0, name="it"), held={name: value}) for index, value in enumerate(values)]
    )


@pytest.mark.parametrize(
    ("values", "leaks"),
    [
        ([9, 9, 10, 11], True),
        ([1, 2, 3, 4, 5, 6], True),
        # a pool that fills up, and one that was emptied again
        ([1, 2, 3, 4, 4, 4], False),
        ([1, 2, 3, 4, 5, 1], False),
        ([1, 2, 3], False),
    ],
)
def test_what_is_counted_exactly_leaks_when_each_round_adds(values: list[int], leaks: bool) -> None:
    for name in series.EXACT:
        assert (climbing(name, values) is not None) == leaks


def test_what_others_use_too_leaks_when_it_climbs_by_much_and_steadily() -> None:
    for name, much in series.COARSE.items():
        steady = [number * much // 10 for number in range(13)]
        assert climbing(name, steady) is not None
        assert climbing(name, steady[:8]) is None
        assert climbing(name, [value // 2 for value in steady]) is None
        assert climbing(name, [0] * 7 + [4 * much] * 6) is None
        assert climbing(name, [*steady[:-1], 0]) is None


def test_rounds_are_found_wherever_they_are() -> None:
    chance = Random(1)
    for _ in range(300):
        turn = [chance.randrange(4) for _ in range(chance.randint(1, 6))]
        before = [9] * chance.randrange(3)
        shapes = [*before, *turn * chance.randint(4, 9), *turn[: chance.randrange(len(turn))], 8]
        found = list(repeated(shapes))
        assert found
        for rounds in found:
            end = rounds.start + rounds.length * rounds.count
            assert rounds.start >= 0 and end <= len(shapes) and rounds.count >= 4
            for at in range(rounds.start + rounds.length, end):
                assert shapes[at] == shapes[at - rounds.length]
    assert list(repeated([1, 2, 3, 4, 5] * 3)) == []


def test_launches_are_compared_for_the_same_rows_without_a_cuda_graph() -> None:
    here, there = Decode(batch=TWO), Decode(batch=[Run(1, [1]), Run(0, [2])])
    fault = series.fault([sample(0, here, work=100), sample(1, here, work=90), sample(2, there, work=180)])
    assert fault is not None and (fault.kind, fault.signature.where, fault.step.index) == ("slow", "launches", 2)
    assert series.fault([sample(0, here, work=90), sample(1, there, work=179)]) is None
    # the graph replays its launches unseen; the first of a kind may warm up; a longer cache may take other kernels
    assert series.fault([sample(0, here, work=9, graph=1), sample(1, there, work=180)]) is None
    assert series.fault([sample(0, here, work=90), sample(1, there, work=180), sample(2, there, work=90)]) is None
    assert series.fault([sample(0, here, work=90), sample(1, there, (300, 300), 180)]) is None
