"""A finding as a regression test for pytest: it fails while the fault is there, and skips without the build."""

from __future__ import annotations

import itertools
import json
import shlex

import msgspec

from isolate.case import Case
from isolate.fault import Finding

_PROGRAM = '''
import json
import os

import pytest

isolate_cli = pytest.importorskip("isolate.cli")
testing = pytest.importorskip("click.testing")

#: switches of `isolate run` that the fault was found with
SWITCHES = {switches}
#: the fault needs another build than llama-cpp-python's: ISOLATE_BUILD names it
NEEDS_BUILD = {needs_build}
CASE = r"""
{case}
"""


def test_{name}(tmp_path):
    if NEEDS_BUILD and "ISOLATE_BUILD" not in os.environ:
        pytest.skip("ISOLATE_BUILD is not set: the build that the fault was found in")
    path, found = tmp_path / "case.json", tmp_path / "found.json"
    path.write_text(CASE)
    words = ["run", str(path), *SWITCHES, "--json", str(found)]
    result = testing.CliRunner().invoke(isolate_cli.main, words)
    if result.exit_code == 2:
        pytest.skip(result.output.strip())
    signatures = [finding["fault"]["signature"] for finding in json.loads(found.read_text())["findings"]]
    assert signatures == [], result.output
'''


def text(finding: Finding, case: Case) -> str:
    """The file's text; it needs isolate, and a case with a zoo model or a model file that stays where it is."""
    words = shlex.split(finding.replay)
    kept: list[str] = []
    pairs = dict(itertools.pairwise(words))
    for switch in ("--target", "--check", "--timeout"):
        kept += [switch, pairs[switch]] if switch in pairs else []
    build = "--build" in words
    # JSON escapes what is not plain and every quote in a text: nothing in it ends the string
    data = json.dumps(msgspec.to_builtins(msgspec.structs.replace(case, expect="pass")), indent=2)
    name = "".join(
        c if c.isascii() and c.isalnum() else "_" for c in f"{finding.fault.kind}_in_{finding.fault.step.kind}"
    )
    head = f"# {json.dumps(str(finding.fault.signature))}\n# {json.dumps(finding.fault.explanation)}"
    program = _PROGRAM.replace("{switches}", json.dumps(kept)).replace("{needs_build}", str(build))
    return head + program.replace("{name}", name).replace("{case}", data)
