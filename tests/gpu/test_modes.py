"""On a real GPU: the shipped cases end under each memory mode as they end without it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isolate import case as cases
from isolate.case import CHECKS
from isolate.errors import IsolateError
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from tests.compile import ROOT
from tests.cuda_builds import ptx80
from tests.gpu.client import needs_gpu

TARGETS = [pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]), "dry:h200"]
FILES = sorted((ROOT / "cases").glob("**/*.json"))
#: What heap corruption does is arbitrary: these show something else from run to run.
ARBITRARY = {"r08-damaged-host-state.json"}


def ending(run: tuple[str, tuple[str, ...], Path]) -> str:
    """How a case ends in a child of its own: `pass`, the fault's signature, or why it cannot be run."""
    target, modes, path = run
    build = str(ptx80())
    with Supervisor(build, None, find(target, build).with_modes(*modes), 90) as children:
        try:
            fault = children.run(cases.read(path), CHECKS, path.parent).fault
        except IsolateError as error:
            return f"not run: {error.message}"
    return str(fault.signature) if fault else "pass"


def endings(target: str, files: list[Path], *modes: str) -> dict[str, str]:
    """Case -> how it ends."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(ending, [(target, modes, path) for path in files])
        return {path.name: how for path, how in zip(files, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_case_ends_otherwise_under_a_memory_mode(target: str) -> None:
    files = [path for path in FILES if path.name not in ARBITRARY]
    if target != "cuda":
        files = files[::6]
    plain = endings(target, files)
    other = {
        mode: endings(target, files, *mode.split(",")) for mode in ("no-vmm", "fence", "fence-before", "poison,fence")
    }
    if target == "cuda" and "ISOLATE_ENDINGS" in os.environ:
        Path(os.environ["ISOLATE_ENDINGS"]).write_text(json.dumps({"plain": plain, **other}, indent=1))
    differ = {
        (mode, name): (plain[name], how)
        for mode, of_mode in other.items()
        for name, how in of_mode.items()
        if how != plain[name]
    }
    assert differ == {}
    assert sum(how == "pass" for how in plain.values()) > len(files) // 4
