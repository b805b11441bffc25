"""What a user types and what they get: exit codes, one sentence for what is not usable, JSON, the replay line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from isolate.cli import main
from isolate.fault import KINDS
from tests.conftest import ROOT, descendants, signals_as_at_a_terminal

TWO_SLOTS = ROOT / "cases" / "two-slots.json"


def isolate(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def case_file(folder: Path, **changes: Any) -> Path:
    """A small case, with changes."""
    data: dict[str, Any] = {
        "isolate": 1,
        "model": {"zoo": "llama"},
        "steps": [{"step": "decode", "batch": [{"slot": 0, "tokens": [1, 2, 3]}]}],
    }
    path = folder / "case.json"
    path.write_text(json.dumps(data | changes))
    return path


def failing_case(folder: Path) -> Path:
    """Five tokens where a batch holds four: the library asserts in llama_decode."""
    steps = [{"step": "decode", "batch": [{"slot": 0, "tokens": [1, 2, 3, 4, 5]}]}]
    return case_file(folder, context={"n_batch": 4, "n_ubatch": 4}, steps=steps, hostile=True)


def truncated(folder: Path) -> list[object]:
    whole = folder / "whole.gguf"
    assert isolate("model", "llama", "--out", whole).exit_code == 0
    (folder / "cut.gguf").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    return ["run", case_file(folder, model={"file": "cut.gguf"})]


def not_gguf(folder: Path) -> list[object]:
    (folder / "m.gguf").write_bytes(b"\x7fELF" + bytes(1000))
    return ["run", case_file(folder, model={"file": "m.gguf"})]


def hostile_gguf(folder: Path) -> list[object]:
    """A header that promises more tensors and keys than any file holds."""
    (folder / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16)
    return ["run", case_file(folder, model={"file": "m.gguf"})]


def empty_folder(folder: Path) -> list[object]:
    (folder / "empty").mkdir()
    return ["run", TWO_SLOTS, "--build", folder / "empty"]


def static_build(folder: Path) -> list[object]:
    (folder / "libllama.a").write_bytes(b"!<arch>\n")
    return ["run", TWO_SLOTS, "--build", folder]


def text_for_a_library(folder: Path) -> list[object]:
    (folder / "libllama.so").write_text("not a library")
    return ["doctor", "--build", folder]


def named_pipe(folder: Path) -> list[object]:
    os.mkfifo(folder / "pipe.gguf")
    return ["run", case_file(folder, model={"file": "pipe.gguf"})]


def newer_model(folder: Path) -> list[object]:
    """A model of an architecture that no build has yet."""
    assert isolate("model", "llama", "--layers", 1, "--out", folder / "m.gguf").exit_code == 0
    name, data = b"general.architecture", (folder / "m.gguf").read_bytes()
    place = data.index(b"llama", data.index(name))
    (folder / "m.gguf").write_bytes(data[:place] + b"llamb" + data[place + 5 :])
    return ["run", case_file(folder, model={"file": "m.gguf"})]


def what_json_wrote(folder: Path) -> list[object]:
    isolate("run", TWO_SLOTS, "--json", folder / "found.json")
    return ["minimize", folder / "found.json"]


def context(folder: Path, **settings: Any) -> list[object]:
    return ["run", case_file(folder, context=settings)]


BROKEN: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "truncated GGUF": (truncated, "cut.gguf"),
    "not a GGUF": (not_gguf, "m.gguf"),
    "hostile GGUF": (hostile_gguf, "m.gguf"),
    "model is a pipe": (named_pipe, "pipe.gguf"),
    "model of an architecture the build lacks": (newer_model, "no architecture llamb.*--model"),
    "findings for a case": (what_json_wrote, "found.json: .*--json, not a case.*isolate export"),
    "a table for a case": (
        lambda f: ["run", ROOT / "cases/parallel-checkpoints.toml"],
        "toml: not JSON.*isolate matrix",
    ),
    "a folder for a trace": (lambda f: ["trace", f], "not a file"),
    "missing table": (lambda f: ["matrix", f / "none.toml"], "none.toml: cannot be read"),
    "page nowhere to write": (
        lambda f: ["matrix", ROOT / "cases/parallel-checkpoints.toml", "--html", f],
        "it is a folder",
    ),
    "missing model": (lambda f: ["run", case_file(f, model={"file": "none.gguf"})], "none.gguf"),
    "bad field": (lambda f: ["run", case_file(f, stpes=[])], "stpes"),
    "missing case": (lambda f: ["run", f / "none.json"], "none.json: cannot be read"),
    "missing build": (lambda f: ["run", TWO_SLOTS, "--build", f / "none"], "--build"),
    "missing build for kernels": (lambda f: ["kernels", f / "none"], "none does not exist: name a folder"),
    "CPU build for a GPU": (lambda f: ["run", TWO_SLOTS, "--target", "cuda"], "no CUDA backend.*--build"),
    "text for a case of a matrix": (lambda f: ["matrix", ROOT / "README.md"], "README.md: not JSON"),
    "folder without libllama": (empty_folder, "--build"),
    "static build": (static_build, "static"),
    "text for a library": (text_for_a_library, "libllama.so"),
    "KV type the build lacks": (lambda f: context(f, type_k="turbo3"), "case.json: context: type_k is 'turbo3'.*q8_0"),
    "n_ctx 0": (lambda f: context(f, n_ctx=0), "n_ctx.*>= 1"),
    "n_ctx -1": (lambda f: context(f, n_ctx=-1), "n_ctx.*>= 1"),
    "n_ctx huge": (lambda f: context(f, n_ctx=1 << 40), "n_ctx.*<="),
    "a setting the build lacks": (lambda f: ["run", TWO_SLOTS, "--include", f], "--include|llama.h"),
    "unknown target": (lambda f: ["run", TWO_SLOTS, "--target", "tpu"], "'tpu'.*cpu"),
    "unknown check": (lambda f: ["run", TWO_SLOTS, "--check", "logit"], "'logit'.*logits"),
    "unknown zoo model": (lambda f: ["run", TWO_SLOTS, "--model", "zoo:gpt9"], "gpt9.*qwen35moe"),
    "unknown model type": (lambda f: ["run", TWO_SLOTS, "--model", "zoo:llama:q99"], "Q99.*Q3_K"),
    "zoo model nowhere to write": (lambda f: ["model", "llama", "--out", f / "no" / "m.gguf"], "m.gguf"),
    "trace nowhere to write": (lambda f: ["run", TWO_SLOTS, "--trace", f / "no" / "t"], "trace"),
    "JSON nowhere to write": (lambda f: ["run", TWO_SLOTS, "--json", f / "no" / "j"], "j: cannot be written"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.usefixtures("nothing_left")
def test_what_is_not_usable_is_one_sentence_and_exit_code_2(name: str, tmp_path: Path) -> None:
    words, said = BROKEN[name]
    line = words(tmp_path)
    start = time.monotonic()
    result = isolate(*line)
    assert time.monotonic() - start < 5
    assert result.exit_code == 2, result.output
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert re.search(said, message), message


def test_a_run_without_a_fault_exits_0_and_one_with_a_fault_exits_1(tmp_path: Path) -> None:
    assert isolate("run", TWO_SLOTS).exit_code == 0
    failing = failing_case(tmp_path)
    result = isolate("run", failing, TWO_SLOTS)
    assert result.exit_code == 1
    assert "GGML_ASSERT" in result.output and "step 0 `decode`" in result.output
    assert result.output.index("fault") < result.output.index("pass")


def test_the_last_line_of_a_finding_replays_it(tmp_path: Path) -> None:
    failing = failing_case(tmp_path)
    first = isolate("run", failing, "--check", "all", "--json", tmp_path / "first.json")
    words = shlex.split(first.output.strip().splitlines()[-1].removeprefix("replay").strip().removeprefix("replay"))
    assert words[:2] == ["isolate", "run"]
    again = isolate(*words[1:], "--json", tmp_path / "again.json")
    assert again.exit_code == first.exit_code == 1
    signatures = [
        [finding["fault"]["signature"] for finding in json.loads((tmp_path / name).read_text())["findings"]]
        for name in ("first.json", "again.json")
    ]
    assert signatures[0] == signatures[1] and len(signatures[0]) == 1


def test_json_on_standard_output_is_the_schema_and_nothing_else(tmp_path: Path) -> None:
    failing = failing_case(tmp_path)
    result = isolate("run", failing, "--json", "-", "--repeat", 2)
    data = json.loads(result.stdout)
    assert data["schema"] == "isolate.findings/1" and data["ran"] == 2
    (finding,) = data["findings"]
    assert set(finding) == {"case", "fault", "repeats", "replay"}
    fields = {"kind", "signature", "step", "origin", "report", "node", "launch", "explanation"}
    assert fields <= set(finding["fault"])
    assert finding["fault"]["kind"] in KINDS and finding["repeats"] == {"times": 2, "of": 2}


def test_doctor_says_in_one_screen_whether_a_build_can_be_driven(tmp_path: Path) -> None:
    result = isolate("doctor", "--json", tmp_path / "d.json")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) <= 40 and lines[-1].endswith("this build can be driven")
    data = json.loads((tmp_path / "d.json").read_text())
    assert data["schema"] == "isolate.doctor/1" and "q8_0" in data["kv_types"] and data["layouts"]["source"]


def test_the_zoo_is_listed_and_a_model_is_written(tmp_path: Path) -> None:
    listed = isolate("model").output
    assert all(name in listed for name in ("qwen35moe", "mamba2", "llama", "deepseek2"))
    out = tmp_path / "tiny.gguf"
    result = isolate("model", "qwen3moe", "--type", "Q3_K", "--out", out)
    assert result.exit_code == 0 and out.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("stop", ["run", "doctor"])
def test_ctrl_c_ends_quietly(stop: str) -> None:
    words = {"run": ["run", TWO_SLOTS, "--repeat", "1000"], "doctor": ["doctor"]}[stop]
    process = subprocess.Popen(
        [sys.executable, "-m", "isolate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=signals_as_at_a_terminal,
    )
    while not descendants(process.pid):
        time.sleep(0.01)
    process.send_signal(2)
    _, errors = process.communicate(timeout=10)
    assert "Traceback" not in errors
    assert process.returncode in (0, 130)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_standard_file_changes_nothing(closed: str) -> None:
    run = f"{sys.executable} -c 'from isolate.cli import main; main()' run {TWO_SLOTS} {closed}"
    assert subprocess.run(["sh", "-c", run], cwd=ROOT, capture_output=True).returncode == 0


SLOW_IMPORT = """
import importlib.abc, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "isolate.cli":
            print("importing", flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
from isolate.__main__ import main
main()
"""


def test_ctrl_c_while_the_commands_are_imported_ends_without_a_word() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=signals_as_at_a_terminal
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


@pytest.mark.parametrize("words", [["run", str(TWO_SLOTS)], ["--help"]], ids=["run", "help"])
def test_output_that_nobody_reads_is_no_fault(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "isolate", *words], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_what_a_case_says_is_no_command_to_the_terminal(tmp_path: Path) -> None:
    path = failing_case(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": "see \x1b[2J\x9b31m\r\u202e this\x07"}))
    output = isolate("run", path).output
    assert r"see \x1b[2J\x9b31m \u202e this\x07" in output
    assert not set(output) & set("\x1b\x9b\r\u202e\x07")
    refused = isolate("run", tmp_path / "\x1b[2J.json").output
    assert r"\x1b[2J.json: cannot be read" in refused and "\x1b" not in refused


def test_a_gpu_that_is_a_device_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("/dev/zero")
    result = isolate("run", TWO_SLOTS, "--target", f"dry:{tmp_path / 'x.json'}")
    assert result.exit_code == 2 and "x.json: larger than 1 MiB" in result.output


def test_a_model_does_not_take_the_place_of_a_device() -> None:
    result = isolate("model", "llama", "--out", "/dev/full")
    assert result.exit_code == 2 and "/dev/full: not a file" in result.output
    assert Path("/dev/full").is_char_device()


def test_the_installed_command_is_on_the_path() -> None:
    command = shutil.which("isolate", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("isolate is not installed in this environment")
    assert "doctor" in subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
