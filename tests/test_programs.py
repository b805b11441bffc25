"""Exported programs compare as the oracles do: they end with 0 on a right library, and with 1 on one that does the same wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from isolate.case import Case, Check, Checkpoint, Damage, Decode, Load, Reopen, Restore, Run, Save, SeqRm, Step
from isolate.errors import IsolateError
from isolate.fault import Call, Fault, Finding, Signature, StepInFlight
from isolate.library.find import find_build
from isolate.replay.again import MOST_TOKENS
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import Target
from isolate.report import cpp, python
from tests.compile import build
from tests.conftest import ROOT, TESTS
from tests.test_export import compiled, model_of
from tests.test_oracle import ANSWER, F32, PROMPTS, case, serving


@pytest.fixture(autouse=True)
def default_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOLATE_BUILD", raising=False)


@pytest.fixture(scope="module")
def wrong_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wrong") / "wrong.so", ["tests/native/wrong_calls.c"], "-shared", "-fPIC")


def fault_of(what: str, at: int, asked: Case, check: Check) -> Fault:
    """What the oracle says where the library does something wrong just before step `at`."""
    environment = {"WRONG": f"{what}@{at}", "PYTHONPATH": f"{TESTS}:{ROOT}"}
    with Supervisor(target=Target("cpu", 0, environment=environment), worker="wrong_worker") as children:
        fault = children.run(asked, (check,)).fault
    assert fault is not None
    assert (fault.kind, fault.step.index) == (check, at)
    # as it comes back from a file
    return with_evidence(fault, json.loads(json.dumps(fault.evidence)))


def with_evidence(fault: Fault, evidence: dict[str, Any]) -> Fault:
    return Fault(
        fault.kind, fault.signature, fault.step, fault.origin, fault.report, fault.explanation, evidence=evidence
    )


class Program:
    """An exported program, ready to be run."""

    def __init__(self, form: str, fault: Fault, asked: Case, folder: Path) -> None:
        self.form = form
        finding = Finding(asked.as_json(), fault, 1, 1, "isolate run case.json")
        source = folder / f"program.{form}"
        source.write_text({"cpp": cpp.text, "py": python.text}[form](finding, asked))
        asked.write(folder / "case.json")
        self.model = model_of(folder / "case.json", folder)
        self.path = compiled(source, find_build().llama.parent) if form == "cpp" else source

    def ends(self, wrong: str = "", preload: Path | None = None) -> tuple[int, str]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(find_build().llama.parent), "PYTHONPATH": str(ROOT)}
        command: list[str | Path] = [self.path]
        if self.form == "py":
            command = [sys.executable, *([TESTS / "wrong_calls.py"] if wrong else []), self.path]
        elif preload:
            environment["LD_PRELOAD"] = str(preload)
        environment |= {"WRONG": wrong} if wrong else {}
        ended = subprocess.run(
            [*map(str, command), str(self.model)], env=environment, capture_output=True, text=True, timeout=120
        )
        return ended.returncode, ended.stdout + (ended.stderr if ended.returncode == 2 else "")


STATES: Sequence[Step] = (
    SeqRm(slot=1),
    Load(name="file", slot=1, damage=Damage(cut=9), returns=0),
    Load(name="whole", slot=1, damage=Damage(cut=9), returns=0),
    Reopen(context=replace(F32, n_ctx=512, kv_unified=False)),
    PROMPTS,
    Decode(batch=[Run(0, "greedy"), Run(1, "greedy", "none")]),
    Checkpoint(slot=1, name="part"),
    Save(slot=1, name="in-file", via="file"),
    Restore(name="part"),
    ANSWER,
)
LOADED: Sequence[Step] = (PROMPTS, Save(slot=0, name="whole"), SeqRm(slot=1), Load(name="whole", slot=1))
#: what is wrong, what the oracle sees, on which model, and the steps; the last one is where it goes wrong
WRONGS: dict[str, tuple[str, Check, str, Sequence[Step]]] = {
    "positions": ("all", "positions", "llama", serving("llama")),
    "positions of a window": ("all", "positions", "gemma3", serving("gemma3")),
    "positions of a state": ("all", "positions", "mamba2", [*serving("mamba2"), Checkpoint(slot=0, name="end")]),
    "logits": ("poison", "logits", "llama", serving("llama")),
    "logits after a new context": ("poison", "logits", "llama", [*serving("llama"), *STATES]),
    "logits of a hybrid": ("poison", "logits", "qwen35moe", serving("qwen35moe")),
    "nan": ("poison", "nan", "llama", serving("llama")),
    "cells saved": ("lossy", "cells", "llama", [*serving("llama"), *STATES[:-2]]),
    "cells set": ("lossy", "cells", "llama", LOADED),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cpp", "py"])
@pytest.mark.parametrize("name", WRONGS)
def test_a_program_sees_what_the_oracle_saw(name: str, form: str, tmp_path: Path, wrong_calls: Path) -> None:
    what, check, zoo, steps = WRONGS[name]
    asked = replace(case(zoo, *steps), api="llama_process" if "new context" in name else "llama_decode")
    last = len(asked.steps) - 1
    fault = fault_of(what, last, asked, check)
    program = Program(form, fault, asked, tmp_path)
    assert program.ends() == (0, "no fault\n")
    code, said = program.ends(check, wrong_calls)
    assert (code, said.split(" of ")[0]) == (1, f"FAULT in step {last}: {'logits' if check == 'nan' else check}")


def plain(kind: str, step: StepInFlight, evidence: dict[str, Any] | None = None) -> Fault:
    call = Call("llama_decode")
    return Fault(kind, Signature(kind, "", None, step.kind), step, call, call, "", evidence=evidence or {})


@pytest.mark.parametrize("form", ["cpp", "py"])
@pytest.mark.parametrize("kind", ["context", "close"])
def test_a_fault_outside_the_steps_is_looked_for_there(kind: str, form: str, tmp_path: Path) -> None:
    program = Program(form, plain("assert", StepInFlight(None, kind)), case("llama", PROMPTS), tmp_path)
    assert program.ends() == (0, "no fault\n")
    assert ("llama_model_free(model)" in program.path.with_suffix(f".{form}").read_text()) is (kind == "close")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (plain("engine", StepInFlight(0, "decode")), "isolate itself failed"),
        (plain("assert", StepInFlight(0, "check")), "in a comparison that an oracle made"),
        (plain("positions", StepInFlight(0, "decode")), "does not hold what was expected"),
        (plain("logits", StepInFlight(0, "decode"), {"again": {"slot": "0"}}), "`again` in the fault's evidence: "),
        (plain("logits", StepInFlight(0, "decode"), {"again": {"slot": 0, "position": 0, "limit": 1.0, "cells": 256, "acts": None}}), f"more than {MOST_TOKENS} tokens"),
        (plain("logits", StepInFlight(0, "decode"), {"again": {"slot": 0, "position": 9, "limit": 1.0, "cells": 256, "acts": [{"type": "decoded", "start": 0, "tokens": [1]}]}}), "does not decode position 9 last"),
    ],
)  # fmt: skip
def test_what_no_program_can_show_is_refused_in_a_sentence(fault: Fault, says: str) -> None:
    asked = case("llama", PROMPTS)
    for writer in (cpp.text, python.text):
        with pytest.raises(IsolateError, match=says):
            writer(Finding(asked.as_json(), fault, 1, 1, "isolate run case.json"), asked)
