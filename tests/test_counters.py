"""What a run leaves to count: the kernels it launched."""

from __future__ import annotations

from math import log2, prod
from pathlib import Path

import pytest

from isolate import case as cases
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from isolate.trace.launch import kernel_name, kernels_seen
from isolate.trace.record import Kind, LaunchDetail
from isolate.trace.ring import Ring
from tests import cuda_builds
from tests.conftest import ROOT

CASES = ROOT / "cases"
R21 = cases.read(CASES / "cuda" / "r21-gap-between-busy-slots.json")
REFUSED = cases.read(CASES / "moe-small-batch.json")


@pytest.fixture(scope="module")
def cuda_build() -> str:
    return str(cuda_builds.ptx80())


def h200(build: str, trace: Path | None = None) -> Supervisor:
    return Supervisor(build, target=find("dry:h200", build), trace=trace)


@pytest.mark.parametrize(("case", "fault"), [(R21, None), (REFUSED, "cuda")])
def test_the_kernels_of_a_run_are_known_whether_its_child_lives_or_not(
    case: cases.Case, fault: str | None, cuda_build: str, tmp_path: Path
) -> None:
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


def test_each_run_has_its_own_kernels_and_a_target_without_hooks_none(cuda_build: str) -> None:
    with h200(cuda_build) as children:
        assert children.seen() == frozenset()
        assert children.run(R21).fault is None
        some = children.seen()
        assert children.run(REFUSED).fault is not None
        others = children.seen()
        assert some - others and others - some
    with Supervisor() as children:
        assert children.run(R21).fault is None
        assert children.seen() == frozenset()
