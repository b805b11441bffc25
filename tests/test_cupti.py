"""CUPTI's callbacks, from a stand-in: where no hook can stand, the same records come from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isolate.trace.record import Kind, LaunchDetail, Record
from isolate.trace.ring import Ring
from tests.compile import build

CHILD = """
import ctypes, sys
from isolate.trace.hooks import Hooks
from isolate.trace.ring import Writer
hooks = Hooks(Writer(sys.argv[1]))
assert hooks.live().why_not().startswith("no loaded library calls a shared CUDA runtime")
print(hooks.attach_cupti())
cupti = ctypes.CDLL("libcupti.so.13")
{calls}
print(hooks.attach_cupti())
"""


def run(folder: Path, calls: str) -> tuple[list[str], list[Record]]:
    """What the child printed, and what it traced."""
    library = folder / "libcupti.so.13"
    build(library, ["tests/native/standin_cupti.c"], "-shared", "-fPIC", f"-Wl,-soname,{library.name}")
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(calls=calls), str(folder / "trace")],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    with Ring(folder / "trace") as ring:
        return done.stdout.splitlines(), list(ring.records())


def test_launches_are_recorded_with_the_geometry_that_the_driver_saw(tmp_path: Path) -> None:
    calls = """
cupti.set_device(1)
cupti.launch(b"_Z1av", 10, 32, 0, 1)
cupti.call(b"cudaGetLastError", 0)
cupti.call(b"cudaStreamBeginCapture", 0)
cupti.launch_by_driver(b"_Z1bv", 20, 64, 0)
cupti.call(b"cudaStreamEndCapture", 0)
cupti.launch(b"_Z1cv", 30, 2048, 1, 1)
cupti.launch(b"_Z1dv", 40, 32, 98, 0)
cupti.call(b"cudaGetLastError", 98)
cupti.call(b"cudaMemcpyAsync", 0)
"""
    printed, records = run(tmp_path, calls)
    assert printed[0] == ""
    assert "CUptiResult 39" in printed[1]  # one subscriber at a time
    launches = [record for record in records if record.kind == Kind.LAUNCH]
    assert [(r.launch, r.call, r.name, r.code, r.device) for r in launches] == [
        (1, "__cudaLaunchKernel", "_Z1av", 0, 1),
        (2, "cuLaunchKernelEx", "_Z1bv", 0, 1),
        (3, "__cudaLaunchKernel", "_Z1cv", 1, 1),
        (4, "__cudaLaunchKernel", "_Z1dv", 98, 1),
    ]
    details = [record.detail for record in launches if isinstance(record.detail, LaunchDetail)]
    assert [(detail.grid, detail.block, detail.shared) for detail in details] == [
        ((10, 1, 1), (32, 1, 1), 128),
        ((20, 2, 3), (64, 1, 1), 0),
        ((30, 1, 1), (2048, 1, 1), 128),
        ((0, 0, 0), (0, 0, 0), 0),  # it never came to the driver, so nobody saw its geometry
    ]
    assert [record.stream for record in launches] == [77, 78, 77, 0]
    others = [(record.call, record.kind, record.code) for record in records if record.kind != Kind.LAUNCH]
    assert others == [
        ("cudaSetDevice", Kind.QUERY, 0),
        ("cudaStreamBeginCapture", Kind.GRAPH, 0),
        ("cudaStreamEndCapture", Kind.GRAPH, 0),
        ("cudaGetLastError", Kind.QUERY, 98),
        ("cudaMemcpyAsync", Kind.COPY, 0),
    ]


def test_without_cupti_the_reason_is_given(tmp_path: Path) -> None:
    code = CHILD.replace("{calls}", "").replace('cupti = ctypes.CDLL("libcupti.so.13")', "")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "trace")], check=True, text=True, stdout=subprocess.PIPE
    )
    if not done.stdout.splitlines()[0]:
        pytest.skip("CUPTI works on this machine")
    # Where it is installed and no driver is, it says so itself.
    assert done.stdout.startswith(
        ("CUPTI was not found (libcupti.so.13 and libcupti.so.12 ", "CUPTI refused (CUptiResult ")
    )
