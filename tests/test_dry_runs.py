"""Whole runs on simulated GPUs with a real CUDA build: the seed's fault where it is, and nowhere else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from isolate.cli import main
from isolate.trace import gpus
from tests.conftest import ROOT

CASES = ROOT / "cases"
BUILD = os.environ.get("ISOLATE_CUDA_BUILD", "")

pytestmark = pytest.mark.skipif(not BUILD, reason="ISOLATE_CUDA_BUILD names no CUDA build for compute_80")

#: Launch number, kernel, grid and block as a real H200 refused them (isolate's own runs, and those of the first prototype).
SEED = {
    "seed-two-slots": (585, (384, 2, 1), (32, 8, 1)),
    "seed-three-slots": (859, (384, 2, 1), (32, 6, 1)),
    "seed-small-batches": (1812, (384, 2, 1), (32, 8, 1)),
}


def isolate(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def fault(tmp_path: Path, case: Path, *words: object) -> dict[str, object] | None:
    out = tmp_path / "found.json"
    result = isolate("run", case, "--build", BUILD, "--json", out, *words)
    assert result.exit_code in (0, 1), result.output
    found = json.loads(out.read_text())["findings"]
    assert len(found) == result.exit_code
    return found[0]["fault"] if found else None


@pytest.mark.parametrize("name", SEED)
def test_the_seed_is_refused_at_the_launch_where_an_h200_refuses_it(name: str, tmp_path: Path) -> None:
    found = fault(tmp_path, CASES / "cuda" / f"{name}.json", "--target", "dry:h200")
    number, grid, block = SEED[name]
    assert found is not None
    launch = found["launch"]
    assert isinstance(launch, dict)
    assert launch["demangled"] == "mul_mat_vec_q_moe<(ggml_type)11, 2, false>"
    assert (launch["number"], tuple(launch["grid"]), tuple(launch["block"])) == (number, grid, block)


def test_the_report_names_limit_architecture_node_and_messenger(tmp_path: Path) -> None:
    found = fault(tmp_path, CASES / "moe-small-batch.json", "--target", "dry:h200", "--deep")
    assert found is not None
    explanation = str(found["explanation"])
    assert "192 threads a block, and this kernel allows at most 160" in explanation
    assert "compiled for compute capability 8.0 and the device has 9.0" in explanation
    node, origin, report = found["node"], found["origin"], found["report"]
    assert isinstance(node, dict) and isinstance(origin, dict) and isinstance(report, dict)
    assert node["op"] == "MUL_MAT_ID" and node["name"].startswith("ffn_moe_gate")
    assert (origin["call"], origin["code"]) == ("__cudaLaunchKernel", 1)
    assert (report["call"], report["file"]) == ("ggml_cuda_kernel_launch", "common.cuh") and report["line"] > 0


@pytest.mark.parametrize(("rows", "refused"), [(1, False), (5, False), (6, True), (7, True), (8, True), (16, False)])
def test_only_six_to_eight_rows_are_refused(rows: int, refused: bool, tmp_path: Path) -> None:
    case = json.loads((CASES / "moe-small-batch.json").read_text())
    case["steps"] = [{"step": "decode", "batch": [{"slot": 0, "tokens": list(range(rows))}]}]
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert (fault(tmp_path, tmp_path / "case.json", "--target", "dry:h200") is not None) == refused


def test_the_same_launches_every_time(tmp_path: Path) -> None:
    lines = []
    for name in ("first", "second"):
        trace = tmp_path / name
        assert (
            isolate(
                "run", CASES / "two-slots.json", "--build", BUILD, "--target", "dry:h200", "--trace", trace
            ).exit_code
            == 0
        )
        shown = isolate("trace", trace, "--kernel", "")
        assert shown.exit_code == 0
        # The number of the record is not the launch's: other calls may come in between.
        lines.append([line.split("launch ", 1)[1] for line in shown.output.splitlines() if "launch " in line])
    assert len(lines[0]) > 100 and lines[0] == lines[1]


def test_a_trace_is_filtered_counted_and_written_for_perfetto(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    words = ("run", CASES / "moe-small-batch.json", "--build", BUILD, "--target", "dry:h200", "--trace", trace)
    assert isolate(*words).exit_code == 1
    (line,) = isolate("trace", trace, "--kernel", "mul_mat_vec_q_moe", "--step", 0).output.splitlines()
    assert "launch 37 " in line and "returned 1" in line
    counted = isolate("trace", trace, "--counts").output
    assert any("1 failed" in row and "mul_mat_vec_q_moe" in row for row in counted.splitlines())
    assert isolate("trace", trace, "--chrome", tmp_path / "chrome.json").exit_code == 0
    events = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    assert any(event["cat"] == "launch" and event["ph"] == "X" for event in events)


def test_the_kernels_of_a_build_and_what_a_gpu_would_run(tmp_path: Path) -> None:
    result = isolate("kernels", BUILD, "--kernel", "mul_mat_vec_q_moe<(ggml_type)11, 2, false>", "--gpu", "h200")
    assert result.output.splitlines()[0].endswith("compute_80 (160 threads)")
    assert "have no code that Tesla T4 can run" in isolate("kernels", BUILD, "--gpu", "t4").output.splitlines()[-1]
    out = tmp_path / "kernels.json"
    assert isolate("kernels", BUILD, "--json", out).exit_code == 0
    assert len(json.loads(out.read_text())["kernels"]) > 6000


@pytest.mark.slow
def test_the_fault_is_on_the_gpus_where_host_and_code_disagree(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    words = [CASES / "moe-small-batch.json", CASES / "moe-five-rows.json", "--build", BUILD, "--json", out]
    assert isolate("matrix", *words).exit_code == 1
    cells = {(cell["row"], cell["column"]): cell["said"] for cell in json.loads(out.read_text())["cells"]}
    for name in gpus.names():
        capability = gpus.find(name).capability
        six, five = cells["moe-small-batch", name], cells["moe-five-rows", name]
        if capability < 80:
            assert six == five == "FAULT cudaErrorNoKernelImageForDevice"
        elif capability < 89:
            assert six == five == "pass"
        else:
            assert "mul_mat_vec_q_moe" in six and five == "pass"


def test_what_a_dry_run_cannot_judge_it_says() -> None:
    result = isolate("run", CASES / "two-slots.json", "--build", BUILD, "--target", "dry:h200", "--check", "all")
    assert result.exit_code == 0
    assert "results are not computed, so nan, cells, logits cannot be judged" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "dry:h300", "--build", BUILD], "'h300'.*h200"),
        (["--target", "dry:", "--build", BUILD], "dry:GPU"),
        (["--target", "dry:h200"], "libcudart"),
        (["--fence"], "--fence.*cuda"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(words: list[str], said: str) -> None:
    result = isolate("run", CASES / "two-slots.json", *words)
    assert result.exit_code == 2 and re.search(said, result.stderr.splitlines()[-1]), result.stderr


def test_a_context_that_the_device_has_no_room_for_names_the_call(tmp_path: Path) -> None:
    gpu = {"name": "small", "capability": 90, "processors": 132, "memory_mib": 600}
    (tmp_path / "small.json").write_text(json.dumps(gpu))
    case = json.loads((CASES / "two-slots.json").read_text())
    case["context"]["n_ctx"] = 1 << 20
    (tmp_path / "case.json").write_text(json.dumps(case))
    result = isolate("run", tmp_path / "case.json", "--build", BUILD, "--target", f"dry:{tmp_path / 'small.json'}")
    assert result.exit_code == 2
    assert re.search(
        r"made no context with n_ctx 1048576.*failed: cudaMalloc of \d+ bytes returned \S*MemoryAllocation",
        result.output,
    )
