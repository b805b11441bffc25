"""CUDA builds of llama.cpp, and recordings made with one on an H200, for tests of the dry device.

ISOLATE_CUDA_BUILD is a build with code for compute capability 8.0 alone, ISOLATE_STOCK_BUILD the released libraries of
node-llama-cpp, ISOLATE_H200 a folder of recordings. Without them a folder `shared` beside the checkout is looked at, and
npm is asked for the released libraries.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.compile import ROOT

SHARED = ROOT.parent / "shared"


def ptx80() -> Path:
    """The build whose code was compiled for compute capability 8.0 alone: it has the fault on every later one."""
    if "ISOLATE_CUDA_BUILD" in os.environ:
        return Path(os.environ["ISOLATE_CUDA_BUILD"])
    archive = SHARED / "cuda-ptx80" / "build.tar.xz"
    if not archive.is_file():
        pytest.skip("ISOLATE_CUDA_BUILD is not set: no build for compute capability 8.0")

    def unpack(folder: Path) -> None:
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")

    folder = _kept("cuda-ptx80", unpack)
    return next(folder.rglob("libllama.so")).parent


def stock() -> Path:
    """node-llama-cpp's CUDA build as it is released: PTX 75, 80, 90, machine code 86, 89, 120a, 121a."""
    if "ISOLATE_STOCK_BUILD" in os.environ:
        return Path(os.environ["ISOLATE_STOCK_BUILD"])
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("ISOLATE_STOCK_BUILD is not set and npm is not installed: no released CUDA build")

    def get(folder: Path) -> None:
        command = [
            str(npm),
            "pack",
            "--silent",
            "--pack-destination",
            str(folder),
            "@node-llama-cpp/linux-x64-cuda@3.22.1",
        ]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("node-llama-cpp's CUDA build cannot be downloaded here")
        with tarfile.open(next(folder.glob("*.tgz"))) as content:
            content.extractall(folder, filter="data")
        next(folder.glob("*.tgz")).unlink()

    return next(_kept("node-llama-cpp-cuda", get).rglob("libggml-cuda.so")).parent


def recordings() -> Path:
    """Where the launches are that an H200 made, one a line: number, call, kernel, grid, block, shared memory, code."""
    folder = Path(os.environ.get("ISOLATE_H200") or SHARED / "h200")
    if not folder.is_dir():
        pytest.skip("ISOLATE_H200 is not set: no recordings of an H200")
    return folder


def model(name: str) -> Path:
    """A model the recordings were made with."""
    path = Path(os.environ.get("ISOLATE_MODELS") or SHARED / "models") / name
    if not path.is_file():
        pytest.skip(f"ISOLATE_MODELS is not set: {name} is not here")
    return path


def _kept(name: str, make: object) -> Path:
    """A folder that is made once; tests that run side by side wait for the one that makes it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isolate" / "test-builds"
    kept = Path(os.environ.get("ISOLATE_TEST_BUILDS") or cache) / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (kept.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
                made = Path(temporary) / "made"
                made.mkdir()
                assert callable(make)
                make(made)
                made.rename(kept)
    return kept
