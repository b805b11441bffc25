"""On a real GPU: its dry image answers every call and makes every launch as it does itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolate.replay.target import find
from isolate.trace import devices, gpus
from tests import calls, cuda_builds
from tests.gpu.client import needs_gpu
from tests.launches import launches

pytestmark = [pytest.mark.gpu, needs_gpu]

RECORDED = calls.recorded()
#: Kernels are not run on a dry device, and registers of PTX are not known before a driver compiled it.
APART = {"a fault on the device", "occupancy", "registers of a block"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file that describes the GPU at hand."""
    path = tmp_path_factory.mktemp("gpu") / "this.json"
    gpus.save(devices.first_gpu(), path)
    return str(path)


@pytest.mark.parametrize("title", [title for title in RECORDED if title not in APART])
def test_calls_are_answered_as_by_the_gpu(title: str, image: str, tmp_path: Path) -> None:
    program = calls.client(tmp_path)
    script = calls.script(RECORDED[title])
    assert program.run(script, calls.environment(program.program, image)) == program.run(script, {})


@pytest.mark.parametrize("path", calls.LAUNCHES, ids=lambda path: path.stem)
def test_launches_are_those_of_the_gpu(path: Path, image: str, tmp_path: Path) -> None:
    build = cuda_builds.ptx80()
    dry, _ = launches(path, build, find(f"dry:{image}", str(build)), tmp_path / "dry")
    # The first run compiles kernels for so long that ggml drops its graphs, which it does after 10 s without use.
    launches(path, build, find("cuda"), tmp_path / "compile")
    real, _ = launches(path, build, find("cuda"), tmp_path / "real")
    assert dry == real
