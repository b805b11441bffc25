"""Builds of llama.cpp on dry devices: the launches of an H200, the report that started this, a build without a fault."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from isolate import case as cases
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from isolate.trace import gpus
from tests import big_model, cuda_builds
from tests.calls import LAUNCHES
from tests.conftest import descendants
from tests.launches import comparable, launches


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_launches_are_those_of_the_h200(path: Path, tmp_path: Path) -> None:
    build = cuda_builds.ptx80()
    lines, fault = launches(path, build, find("dry:h200", str(build)), tmp_path / "trace")
    assert fault is None
    recorded = gzip.decompress(path.with_suffix(".txt.gz").read_bytes()).decode().splitlines()
    assert [comparable(line) for line in lines] == [comparable(line) for line in recorded]


def seed_schedule(slots: int, checkpoints: bool, answers: int, model: Path) -> cases.Case:
    """The batches of a server with prompts of 1000 tokens: a prompt's batch ends 4 tokens, and 4 and an ubatch, before its end."""
    done, given = [0] * slots, [0] * slots
    steps: list[dict[str, object]] = []
    while any(count < answers for count in given):
        batch: list[dict[str, object]] = []
        room = 2048
        for slot in range(slots):
            if done[slot] == 1000 and given[slot] < answers:
                batch.append({"slot": slot, "tokens": [1]})
                given[slot] += 1
                room -= 1
        for slot in range(slots):
            first = done[slot]
            while done[slot] < 1000 and room:
                done[slot] += 1
                room -= 1
                if checkpoints and 1000 - done[slot] in (4, 516):
                    break
            if done[slot] > first:
                tokens = {
                    "count": done[slot] - first,
                    "modulo": 120,
                    "first": (7 * first + 13 * slot) % 120,
                    "stride": 7,
                }
                batch.append({"slot": slot, "tokens": tokens, "logits": "last" if done[slot] == 1000 else "none"})
                if checkpoints and first and 1000 - first <= 516:
                    steps.append({"step": "checkpoint", "slot": slot, "name": f"{slot}-{first}"})
        steps.append({"step": "decode", "batch": batch})
    context = {"n_ctx": 61440, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": slots, "type_k": "q8_0", "type_v": "q8_0"}
    case = {
        "isolate": 1,
        "model": {"file": str(model)},
        "context": {**context, "flash_attn_type": "enabled"},
        "steps": steps,
    }
    return cases.parse(json.dumps(case).encode(), "the seed's schedule")


@pytest.mark.parametrize(("name", "checkpoints", "graphs"), [("p2-ck1", True, True), ("p2-ck0-nograph", False, False)])
def test_the_first_recordings_come_out_line_by_line(name: str, checkpoints: bool, graphs: bool, tmp_path: Path) -> None:
    recording = cuda_builds.recordings() / f"{name}.txt.gz"
    build = cuda_builds.ptx80()
    case = seed_schedule(2, checkpoints, 40, cuda_builds.model("qwen35moe-q3k.gguf"))
    lines, _ = launches(case, build, find("dry:h200", str(build)).with_modes(graphs=graphs), tmp_path / "trace")
    recorded = gzip.decompress(recording.read_bytes()).decode().splitlines()
    assert [comparable(line) for line in lines] == [comparable(line) for line in recorded]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [name for name in gpus.names() if gpus.find(name).capability >= 75])
def test_the_released_build_has_no_fault(gpu: str, tmp_path: Path) -> None:
    build = cuda_builds.stock()
    case = seed_schedule(2, True, 20, cuda_builds.model("qwen35moe-q3k.gguf"))
    lines, fault = launches(case, build, find(f"dry:{gpu}", str(build)), tmp_path / "trace")
    assert fault is None
    assert len(lines) > 800


@pytest.mark.slow
def test_a_model_larger_than_memory_runs(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = memory * 5 // 4
    if size > gpus.find("b200").memory_mib << 20:
        pytest.skip("this machine has more memory than a B200")
    model = tmp_path / "big.gguf"
    assert big_model.write(model, size) > memory
    assert model.stat().st_blocks * 512 < 1 << 20
    build = cuda_builds.ptx80()
    batch = [{"slot": 0, "tokens": {"count": 40, "modulo": 120}}]
    steps = [{"step": "decode", "batch": batch}, {"step": "decode", "batch": [{"slot": 0, "tokens": [1]}]}]
    case = cases.parse(json.dumps({"isolate": 1, "model": {"file": str(model)}, "steps": steps}).encode(), "big")
    with Supervisor(str(build), None, find("dry:b200", str(build))) as children:
        assert children.run(case).fault is None
        (child,) = descendants(os.getpid())
        status = Path(f"/proc/{child}/status").read_text()
    (most,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    assert int(most) < 2 << 20  # KiB


def test_the_seed_runs_in_a_fifth_of_a_second() -> None:
    build = cuda_builds.ptx80()
    case = seed_schedule(2, False, 40, cuda_builds.model("qwen35moe-q3k.gguf"))
    seconds = []
    for _ in range(3):
        with Supervisor(str(build), None, find("dry:h200", str(build))) as child:
            child.describe()
            (process,) = descendants(os.getpid())
            start = _processor_seconds(process)
            assert child.run(case).fault is None
            seconds.append(_processor_seconds(process) - start)
    # of the processor, because others may use it; the model's load is in it
    assert min(seconds) < 0.2


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
