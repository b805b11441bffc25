"""Two contexts in two threads, on two GPUs where there are two: what each calls is what it calls alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from isolate.replay.target import child_environment, find
from isolate.trace.origin import find_origin
from isolate.trace.record import Kind, LaunchDetail, Record
from isolate.trace.ring import Ring
from tests.compile import ROOT
from tests.cuda_builds import ptx80
from tests.gpu.client import needs_gpu

TARGETS = ["dry:h200", "dry:h200,h200", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@dataclass
class Traced:
    """What a child left."""

    #: context -> thread
    threads: dict[str, int]
    trace: Path
    status: int
    errors: str

    def records(self, name: str) -> list[Record]:
        with Ring(self.trace) as ring:
            assert ring.lost == 0
            return [record for record in ring.records() if record.thread == self.threads[name]]

    def launches(self, name: str) -> list[tuple[object, ...]]:
        """Kernel, geometry, whether in a capture."""
        return [
            (record.name, record.detail.grid, record.detail.block, record.detail.shared, record.capturing)
            for record in self.records(name)
            if isinstance(record.detail, LaunchDetail)
        ]


def run(target_name: str, trace: Path, *modes: str, code: int = 0) -> Traced:
    build = str(ptx80())
    target = find(target_name, build)
    words = [str(trace), build, ",".join(modes), str(code), *map(str, target.before)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.two_contexts", *words],
        cwd=ROOT,
        env=child_environment(target),
        capture_output=True,
        text=True,
        timeout=300,
    )
    threads = dict(line.split() for line in done.stdout.splitlines())
    return Traced({name: int(thread) for name, thread in threads.items()}, trace, done.returncode, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "sync"])
@pytest.mark.parametrize("target", TARGETS)
def test_two_contexts_do_not_mix(target: str, mode: str, tmp_path: Path) -> None:
    modes = [mode] if mode else []
    both = run(target, tmp_path / "both", *modes)
    assert both.status == 0, both.errors
    for name in ("one", "other"):
        alone = run(target, tmp_path / name, *modes, name)
        assert alone.status == 0, alone.errors
        assert len(alone.launches(name)) > 300
        assert both.launches(name) == alone.launches(name)
    streams = [{r.stream for r in both.records(name) if r.kind == Kind.LAUNCH} for name in ("one", "other")]
    assert all(streams)
    assert not streams[0] & streams[1]
    devices = [{r.device for r in both.records(name) if r.kind == Kind.LAUNCH} for name in ("one", "other")]
    assert all(len(of_one) == 1 for of_one in devices)
    if target == "dry:h200,h200":
        assert devices[0] != devices[1]
    captured = [r for name in ("one", "other") for r in both.records(name) if r.capturing]
    assert captured
    assert {r.sync for r in captured} == {None}


@pytest.mark.parametrize("target", TARGETS)
def test_a_fault_in_one_of_two_contexts_is_laid_at_it(target: str, tmp_path: Path) -> None:
    died = run(target, tmp_path / "trace", code=701)
    assert died.status == -6, died.errors
    with Ring(died.trace) as ring:
        found = find_origin(ring)
        assert found is not None
        assert found.origin is not None
        assert found.origin.injected
        assert (found.origin.launch, found.code) == (150, 701)
        assert found.origin.thread == found.report.thread == ring.abort_thread
