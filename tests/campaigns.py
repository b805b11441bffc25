"""Small campaigns on a library with a planted fault, for the tests; also as a program that can be killed: FOLDER JOBS."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner, Result

from isolate.cli import main
from isolate.report import json as report_json
from isolate.search.campaign import Campaign
from isolate.search.examples import Examples
from isolate.search.executors import processes
from isolate.search.fuzz import Space
from isolate.search.known import shipped
from isolate.search.shard import Found, Plan
from tests.mutants.worker import WORKER

#: What is planted: a state that is loaded into another slot moves by one.
PLANTED = "LoadIntoAnotherSlotMoves"
PLAN = Plan(
    1, Space(2, None, ("llama",), "F32", steps=(3, 10)), served=0.2, worker=WORKER, size=4, replays=40
)  # fmt: skip
#: So many that the last ones go on from what the first ones tried.
SHARES = 18
CASES = SHARES * PLAN.size


def document(found: Found, path: Path) -> dict[str, Any]:
    """What is kept beside a finding."""
    return report_json.document([found.finding(f"isolate run {path}")], found.of)


def campaign(folder: Path, plan: Plan = PLAN, examples: Examples | None = None) -> Campaign:
    """A campaign in a folder; what the library has by itself is known."""
    return Campaign(plan, folder, shipped(), document, examples)


def kept(folder: Path) -> list[dict[str, Any]]:
    """The shares in a journal that need not be run again, but for how long they took."""
    shares: list[dict[str, Any]] = []
    for line in (folder / "journal.jsonl").read_bytes().splitlines():
        share = msgspec.json.decode(line)
        if share["number"] == len(shares) and not share["cut"]:
            del share["seconds"]
            shares.append(share)
    return shares


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder beside its journal, the folder's own name left out."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "journal.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes().replace(str(folder).encode(), b"FOLDER") for path in paths}


#: Switches of the command for cases that are run fast.
SMALL = ["--model", "zoo:llama:F32", "--slots", "2", "--seed", "5"]


def isolate(*words: object) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(main, [str(word) for word in words])


def sentence(result: Result) -> str:
    """What is said by a command that could not do its work: one line."""
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    return line


def whole_lines(folder: Path) -> list[bytes]:
    """The lines of a journal that have an end."""
    return [line for line in (folder / "journal.jsonl").read_bytes().splitlines(True) if line.endswith(b"\n")]


if __name__ == "__main__":
    os.environ["MUTANT"] = PLANTED
    with campaign(Path(sys.argv[1])) as running, processes(int(sys.argv[2])) as executor:
        running.run(executor, int(sys.argv[2]), CASES, None)
