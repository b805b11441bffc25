"""Work that goes wrong after its call returned is pinned to that call, in the midst of a real decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from isolate.search import pin
from isolate.trace.record import Kind
from isolate.trace.ring import Ring
from tests.cuda_builds import ptx80
from tests.gpu.campaign import CASES
from tests.gpu.client import needs_gpu

#: Target, and what goes wrong there. No kernel runs on the simulated GPU, but a cuBLAS call is held against its memory.
PLANTS = [
    ("dry:h200", "gemm"),
    *(pytest.param("cuda", what, marks=[pytest.mark.gpu, needs_gpu]) for what in ("kernel", "gemm")),
]
CALLS = {"kernel": "__cudaLaunchKernel", "gemm": "cublasSgemm_v2"}
JOB = pin.Job(CASES["graphs"], Path(), "isolate run")


def settings(target: str, what: str, monkeypatch: pytest.MonkeyPatch) -> pin.Settings:
    """Of children that go wrong."""

    def supervisor(settings: pin.Settings) -> Supervisor:
        worker = "tests.gpu.faulty_worker"
        return Supervisor(settings.build, None, settings.target, settings.timeout, settings.trace, worker)

    monkeypatch.setattr(pin, "supervisor", supervisor)
    monkeypatch.setenv("FAULTY", what)
    build = str(ptx80())
    return pin.Settings(find(target, build), build)


def launches_before(target: str, trace: Path) -> int:
    """Launches that the two steps before it make, CUDA graphs off."""
    build = str(ptx80())
    with Supervisor(build, None, find(target, build).with_modes(graphs=False), trace=trace) as children:
        assert children.run(JOB.case).fault is None
    with Ring(trace) as ring:
        return sum(record.kind == Kind.LAUNCH and record.step < 2 for record in ring.records())


@pytest.mark.parametrize(("target", "what"), PLANTS)
def test_at_first_the_origin_is_an_upper_bound(target: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(target, what, monkeypatch)
    with pin.supervisor(chosen) as children:
        (finding,) = pin.pin(children, JOB, chosen).findings
    assert (finding.fault.kind, finding.fault.signature.code, finding.fault.step.index) == ("cuda", 700, 2)
    assert finding.fault.evidence["exact"] is False
    assert "upper bound" in finding.fault.explanation


@pytest.mark.parametrize("window", [pin.WINDOW, 10])
@pytest.mark.parametrize(("target", "what"), PLANTS)
def test_the_deep_passes_name_the_call(
    target: str, what: str, window: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A window of ten launches is moved back until the fault is in it."""
    monkeypatch.setattr(pin, "WINDOW", window)
    chosen = settings(target, what, monkeypatch)
    with pin.supervisor(chosen) as children:
        first = pin.pin(children, JOB, chosen).findings[0].fault
    fault = pin.deepen(JOB, chosen, first)
    before = launches_before(target, tmp_path / "trace")
    assert fault.evidence["exact"] is True, fault.explanation
    assert (fault.origin.call, fault.signature.code) == (CALLS[what], 700)
    assert fault.evidence["launches"] == before + (what == "kernel")
    if what == "kernel":
        assert fault.launch is not None
        assert (fault.launch.kernel, fault.launch.number) == ("nowhere", before + 1)
        assert fault.evidence["compute_sanitizer"].endswith("kns=nowhere --launch-skip 0 --launch-count 1")
