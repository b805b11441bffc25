"""What is handed to a developer works: it compiles, runs, and ends as the finding does; nothing in a case breaks out."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from isolate import case as cases
from isolate.case import JUDGED_BY
from isolate.cli import main
from isolate.library.find import find_build
from isolate.replay.target import device_libraries
from isolate.report.lowered import model_file
from isolate.trace import dry, gpus
from tests import cuda_builds
from tests.conftest import ROOT
from tests.test_cases import FAULTY, name

COMPILER = os.environ.get("CXX", "g++")
#: Its fault is in counts that a program does not take.
SLOW = ROOT / "cases/cuda/r21-gap-between-busy-slots.json"


@pytest.fixture(autouse=True)
def default_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOLATE_BUILD", raising=False)


def isolate(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)


def finding_of(case: Path, found: Path, *words: str | Path) -> dict[str, Any]:
    """Run a case and keep its finding as a file; the finding."""
    assert isolate("run", case, "--json", found, *words).exit_code == 1
    finding: dict[str, Any] = json.loads(found.read_text())["findings"][0]
    return finding


def exported(found: Path, form: str, out: Path) -> Path:
    result = isolate("export", found, "--as", form, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def header() -> Path:
    """Where the wheel of llama-cpp-python puts llama.h."""
    folder = find_build().llama.parents[2] / "include"
    if not (folder / "llama.h").is_file():
        pytest.skip("llama.h of the installed llama-cpp-python is not there")
    return folder


def compiled(source: Path, libraries: Path) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    program = source.with_suffix("")
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    command = [COMPILER, *flags, str(source), f"-I{header()}", f"-L{libraries}", "-lllama", "-lggml", "-lggml-base"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def model_of(case: Path, folder: Path) -> Path:
    """The model's file, written by the command that a program names."""
    name, command = model_file(cases.read(case))
    assert command is not None
    *words, _ = shlex.split(command)[1:]
    assert isolate(*words, folder / name).exit_code == 0
    return folder / name


#: What a program says of a fault that does not end the process.
CHECKED: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(("decode", "state"), lambda fault: f"{fault['origin']['call']} returned {fault['origin']['code']}, "),
    "memory": lambda fault: f"{fault['origin']['call']} returned {fault['origin']['code']}, not ",
    "positions": lambda fault: "positions of slot {slot}: oldest {oldest}, newest {newest}; expected ".format(**fault["evidence"]),
    "logits": lambda fault: "logits of slot {slot} at position {position} are {nmse:.1e} (NMSE)".format(**fault["evidence"]),
    "nan": lambda fault: "logits of slot {slot} at position {position} are not finite".format(**fault["evidence"]),
    "cells": lambda fault: "cells of slot {slot}".format(**fault["evidence"]),
}  # fmt: skip


def ends_like(finding: dict[str, Any], ended: subprocess.CompletedProcess[str]) -> None:
    """The process ended as the finding says: by the same assertion, exception or answer, unless that varies."""
    fault, said = finding["fault"], ended.stdout + ended.stderr
    if fault["kind"] in CHECKED:
        assert ended.returncode == 1, said
        assert f"FAULT in step {fault['step']['index']}: {CHECKED[fault['kind']](fault)}" in said
        return
    assert ended.returncode < 0, said
    if fault["kind"] == "assert" and not finding["case"]["expect"].get("varies"):
        assert fault["report"]["text"].splitlines()[0] in said


def counted(path: Path) -> bool:
    """What shows the fault is counted beside the run."""
    return JUDGED_BY.get(str(getattr(cases.read(path).expect, "kind", ""))) == "counters"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cpp", "python"])
@pytest.mark.parametrize("path", [pytest.param(path, id=name(path)) for path in FAULTY if not counted(path)])
def test_a_program_ends_as_the_finding_does(path: Path, form: str, tmp_path: Path) -> None:
    finding = finding_of(path, tmp_path / "found.json")
    if form == "cpp":
        libraries = find_build().llama.parent
        command = [str(compiled(exported(tmp_path / "found.json", "cpp", tmp_path / "program.cpp"), libraries))]
    else:
        libraries = Path()
        command = [sys.executable, str(exported(tmp_path / "found.json", "python", tmp_path / "program.py"))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "GGML_NO_BACKTRACE": "1"}
    model = model_of(path, tmp_path)
    ended = subprocess.run([*command, str(model)], env=environment, capture_output=True, text=True, timeout=120)
    ends_like(finding, ended)


@pytest.mark.parametrize("form", ["cpp", "python"])
def test_there_is_no_program_for_what_isolate_counts(form: str, tmp_path: Path) -> None:
    finding_of(SLOW, tmp_path / "found.json")
    result = isolate("export", tmp_path / "found.json", "--as", form, "--out", tmp_path / "program")
    assert (result.exit_code, result.output.count("\n")) == (2, 1) and "export it as pytest" in result.output
    assert not (tmp_path / "program").exists()


def test_a_control_ends_with_zero(tmp_path: Path) -> None:
    """The fault of one case with the steps of one that passes: a program must not fail by itself."""
    path = ROOT / "cases/reports/r13-right-restore-hybrid.json"
    finding_of(ROOT / "cases/reports/r12-shift-of-m-rope.json", tmp_path / "found.json")
    document = json.loads((tmp_path / "found.json").read_text())
    document["findings"][0]["case"] = json.loads(path.read_text())
    document["findings"][0]["fault"]["step"]["index"] = len(cases.read(path).steps) - 1
    (tmp_path / "found.json").write_text(json.dumps(document))
    model, libraries = model_of(path, tmp_path), find_build().llama.parent
    program = compiled(exported(tmp_path / "found.json", "cpp", tmp_path / "program.cpp"), libraries)
    script = exported(tmp_path / "found.json", "python", tmp_path / "program.py")
    for command in ([str(program)], [sys.executable, str(script)]):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        ended = subprocess.run([*command, str(model)], env=environment, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stdout) == (0, "no fault\n"), ended.stderr


def test_the_seeds_program_dies_of_the_same_launch_on_the_dry_device(tmp_path: Path) -> None:
    build, seed = cuda_builds.ptx80(), ROOT / "cases/cuda/seed-two-slots.json"
    finding_of(seed, tmp_path / "found.json", "--build", build, "--target", "dry:h200")
    program = compiled(exported(tmp_path / "found.json", "cpp", tmp_path / "program.cpp"), build)
    device = dry.prepare(gpus.find_all("h200"), device_libraries(find_build(str(build))))
    folders = [str(build), str(dry.native_folder())]
    environment = {**os.environ, **device.environment, "LD_LIBRARY_PATH": ":".join(folders), "GGML_NO_BACKTRACE": "1"}
    model = model_of(seed, tmp_path)
    ended = subprocess.run([str(program), str(model)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode < 0, ended.stderr
    assert "mul_mat_vec_q_moeIL9ggml_type11ELi2ELb0" in ended.stderr
    assert "256 threads a block, its launch bound is 160" in ended.stderr
    assert "CUDA error: invalid argument" in ended.stderr


def test_an_exported_regression_test_fails_while_the_fault_is_there_and_skips_without_the_build(tmp_path: Path) -> None:
    finding_of(ROOT / "cases/reports/r11-part-copied-between-streams.json", tmp_path / "found.json")
    test = exported(tmp_path / "found.json", "pytest", tmp_path / "test_exported.py")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(test)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "full KV buffers" in ended.stdout
    test.write_text(test.read_text().replace("NEEDS_BUILD = False", "NEEDS_BUILD = True"))
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    assert "ISOLATE_BUILD is not set" in ended.stdout


NASTY = "x */ \\\n#error \\u000a??/\n</script><script>alert(1)</script> `````` @all \"\"\" ''' & <b>"


def test_nothing_in_a_finding_breaks_out(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    finding_of(ROOT / "cases/reports/r11-part-copied-between-streams.json", found)
    document = json.loads(found.read_text())
    finding = document["findings"][0]
    finding["case"]["about"] = NASTY
    finding["fault"]["explanation"] = NASTY
    finding["fault"]["signature"]["where"] = NASTY
    finding["fault"]["log"] = [NASTY]
    found.write_text(json.dumps(document))
    compiled(exported(found, "cpp", tmp_path / "program.cpp"), find_build().llama.parent)
    compile(exported(found, "python", tmp_path / "program.py").read_text(), "program", "exec")
    test = exported(found, "pytest", tmp_path / "exported_case.py")
    spec = importlib.util.spec_from_file_location("exported_case", test)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.CASE)["about"] == NASTY
    text = exported(found, "issue", tmp_path / "issue.md").read_text()
    fence = "`" * 7
    assert f"\n{fence}shell\n{NASTY}\n{fence}\n" in text
    title = text.splitlines()[0]
    assert "<script>" not in title and "@all" not in title


def test_the_issue_has_the_fields_of_the_template(tmp_path: Path) -> None:
    path = ROOT / "cases/reports/r11-part-copied-between-streams.json"
    finding = finding_of(path, tmp_path / "found.json")
    text = exported(tmp_path / "found.json", "issue", tmp_path / "issue.md").read_text()
    for field in (
        "Name and Version",
        "Operating systems",
        "GGML backends",
        "Hardware",
        "Models",
        "Relevant log output",
    ):
        assert f"\n### {field}\n" in text
    assert f"$ {finding['replay']}" in text
    assert "libllama.so" in text and '#include "llama.h"' in text


def test_the_issue_does_not_tell_the_version_of_a_build_that_the_finding_is_not_of(tmp_path: Path) -> None:
    path = ROOT / "cases/reports/r11-part-copied-between-streams.json"
    folder = find_build().llama.parent
    found = tmp_path / "found.json"
    isolate("run", path, "--build", folder, "--json", found)
    other = isolate("export", found, "--as", "issue")
    assert other.exit_code == 0 and "libllama.so" not in other.stdout and "not told" in other.stdout
    assert other.stderr.count("pass --build") == 1
    given = isolate("export", found, "--as", "issue", "--build", folder)
    assert "libllama.so" in given.stdout and not given.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "not findings"), ('{"schema": "other/1", "findings": []}', "its schema is"), ('{"schema": "isolate.findings/1", "findings": []}', "it holds no finding")],
)  # fmt: skip
def test_a_file_that_holds_no_findings_is_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(content)
    result = isolate("export", tmp_path / "found.json", "--as", "cpp")
    assert result.exit_code == 2
    assert says in result.output


def test_a_case_where_findings_are_wanted_says_where_they_are(tmp_path: Path) -> None:
    case = tmp_path / "case.json"
    case.write_bytes((Path(__file__).parents[1] / "cases/two-slots.json").read_bytes())
    arguments = ["export", str(case), "--as", "issue"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and result.output == (
        f"Error: {case}: this is a case; `isolate run CASE --json FILE` writes its findings\n"
    )
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / "case.json").write_text("{}")
    assert f"its finding is in {tmp_path / 'findings' / 'case.json'}" in CliRunner().invoke(main, arguments).output
