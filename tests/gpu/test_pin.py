"""On a real GPU: a kernel that goes wrong while it runs is pinned to its launch, in the midst of a real decode."""

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

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> pin.Settings:
    """Children that launch the kernel."""

    def supervisor(settings: pin.Settings) -> Supervisor:
        worker = "tests.gpu.faulty_worker"
        return Supervisor(settings.build, None, settings.target, settings.timeout, settings.trace, worker)

    monkeypatch.setattr(pin, "supervisor", supervisor)
    return pin.Settings(find("cuda"), str(ptx80()))


def launches_before(trace: Path) -> int:
    """Launches that the two steps before the kernel's make, CUDA graphs off."""
    target = find("cuda").with_modes(graphs=False)
    with Supervisor(str(ptx80()), None, target, trace=trace) as children:
        assert children.run(CASES["graphs"]).fault is None
    with Ring(trace) as ring:
        return sum(record.kind == Kind.LAUNCH and record.step < 2 for record in ring.records())


def job() -> pin.Job:
    return pin.Job(CASES["graphs"], Path(), "isolate run")


def test_at_first_the_origin_is_an_upper_bound(settings: pin.Settings) -> None:
    with pin.supervisor(settings) as children:
        (finding,) = pin.pin(children, job(), settings).findings
    assert (finding.fault.kind, finding.fault.signature.code, finding.fault.step.index) == ("cuda", 700, 2)
    assert finding.fault.evidence["exact"] is False
    assert "upper bound" in finding.fault.explanation


@pytest.mark.parametrize("window", [pin.WINDOW, 10])
def test_the_deep_passes_name_the_launch(
    settings: pin.Settings, window: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A window of ten launches is moved back until the fault is in it."""
    monkeypatch.setattr(pin, "WINDOW", window)
    with pin.supervisor(settings) as children:
        first = pin.pin(children, job(), settings).findings[0].fault
    fault = pin.deepen(job(), settings, first)
    assert fault.evidence["exact"] is True
    assert fault.launch is not None
    assert (fault.launch.kernel, fault.launch.number) == ("nowhere", 1 + launches_before(tmp_path / "trace"))
    assert fault.signature.code == 700
    assert fault.evidence["compute_sanitizer"].endswith("kns=nowhere --launch-skip 0 --launch-count 1")
