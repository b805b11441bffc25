"""Every CUDA call of three cases is made to fail, and the report names that very call each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.compile import ROOT
from tests.cuda_builds import ptx80
from tests.gpu.client import needs_gpu

#: What is to be struck at least, of each kind, when no call is left out.
KINDS = {"LAUNCH": 500, "COPY": 700, "SET": 20, "MEMORY": 30, "GRAPH": 8, "BLAS": 25, "SYNC": 700, "STREAM": 4}


def campaign(target: str, shards: int, of: int, folder: Path) -> list[dict[str, Any]]:
    """The verdicts of the first `shards` of `of`, side by side; each has a file in the folder."""
    command = [sys.executable, "-m", "tests.gpu.campaign", "--build", str(ptx80()), "--target", target]
    folder.mkdir(exist_ok=True)
    files = [folder / f"{shard}.jsonl" for shard in range(shards)]
    running = []
    for shard, file in enumerate(files):
        with file.open("w") as out:
            running.append(subprocess.Popen([*command, "--shard", f"{shard}/{of}"], cwd=ROOT, stdout=out))
    assert [process.wait() for process in running] == [0] * shards
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def wrong(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [verdict for verdict in verdicts if verdict["result"] == "wrong"]


@pytest.mark.slow
def test_a_tenth_of_the_calls_on_a_simulated_gpu(tmp_path: Path) -> None:
    verdicts = campaign("dry:h200", 2, 20, tmp_path)
    assert wrong(verdicts) == []
    assert Counter(verdict["result"] for verdict in verdicts)["named"] > 200


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
def test_every_call_on_a_real_gpu(tmp_path: Path) -> None:
    """ISOLATE_VERDICTS is a folder that keeps what each said."""
    shards = os.cpu_count() or 1
    verdicts = campaign("cuda", shards, shards, Path(os.environ.get("ISOLATE_VERDICTS") or tmp_path))
    assert wrong(verdicts) == []
    assert len(verdicts) >= 2000
    struck = Counter(verdict["injection"]["kind"] for verdict in verdicts)
    assert {kind: struck[kind] for kind, least in KINDS.items() if struck[kind] < least} == {}
