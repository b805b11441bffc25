"""The line that each command prints to see a result again, taken out of what it printed, runs and gives that result."""

from __future__ import annotations

import html
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from isolate.cli import main
from tests.conftest import ROOT

CASE = ROOT / "cases/reports/r12-shift-of-m-rope.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name a shell would take apart, with a case in it."""
    monkeypatch.delenv("ISOLATE_BUILD", raising=False)
    folder = tmp_path / "it's a $HOME; & <b>"
    folder.mkdir()
    shutil.copy(CASE, folder / "case.json")
    return folder


def isolate(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)


def found(folder: Path) -> Path:
    """Findings of the case, as `--json` writes them."""
    (folder / "findings").mkdir()
    path = folder / "findings" / "found.json"
    assert (
        isolate("run", folder / "case.json", "--check", "positions", "--timeout", "60", "--json", path).exit_code == 1
    )
    return path


def indexed(folder: Path) -> str:
    assert isolate("report", found(folder).parent).exit_code == 0
    page = (folder / "findings" / "index.html").read_text()
    return "\n".join(html.unescape(line) for line in re.findall("<code>(.*?)</code>", page))


COMMANDS: dict[str, Callable[[Path], str]] = {
    "run": lambda folder: isolate("run", folder / "case.json", "--check", "all").output,
    "minimize": lambda folder: isolate("minimize", folder / "case.json", "--confirm", "1", "--out", folder / "least").output,
    "minimize, a budget": lambda folder: isolate("minimize", folder / "case.json", "--budget", "4", "--confirm", "1").output,
    "triage": lambda folder: isolate("triage", folder / "case.json", "--confirm", "1").output,
    "matrix": lambda folder: isolate("matrix", folder / "case.json", "--target", "cpu").output,
    "report": indexed,
    "issue": lambda folder: isolate("export", found(folder), "--as", "issue").output,
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_line_gives_the_fault_again(command: str, folder: Path) -> None:
    printed = COMMANDS[command](folder)
    lines = re.findall(r"(?:^|\W)(isolate run .*)$", printed, flags=re.MULTILINE)
    lines = [line for line in lines if "CASE" not in line]
    assert lines, printed
    for line in dict.fromkeys(lines):
        words = shlex.split(line)
        again = isolate(*words[1:])
        assert again.exit_code == 1, again.output
        assert "hparams.n_pos_per_embd() == 1" in again.output
