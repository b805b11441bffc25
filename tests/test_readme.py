"""What the README shows is true: its example case runs, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from isolate import case as cases
from isolate.case import Step
from isolate.cli import main
from isolate.fault import KINDS
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_the_example_case_has_every_step_and_passes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "example.json"
    path.write_text(example)
    steps = {step.kind for step in cases.read(path).steps}
    assert steps == {str(kind.__struct_config__.tag) for kind in Step.__args__}
    result = CliRunner().invoke(main, ["run", str(path)])
    assert result.exit_code == 0, result.output
    assert "note:" not in result.output


def test_every_kind_of_fault_is_named() -> None:
    (paragraph,) = re.findall(r"Kinds of faults: (.*?)\n\n", README, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(KINDS) - {"engine"}


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_and_option_of_it_is_there(name: str) -> None:
    assert f"isolate {name}" in README
    shown = CliRunner().invoke(main, [name, "--help"]).output
    if name == "run":
        for option in re.findall(r"`(--[a-z]+)", re.findall(r"\| option \|.*?\n\n", README, re.DOTALL)[0]):
            assert option in shown
