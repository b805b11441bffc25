"""What shrinking costs against general tools: predicates asked and the size left, for planted faults of a long case and real ones.

    pip install picire
    python3.12 -m venv other && other/bin/pip install shrinkray
    SHRINKRAY_PYTHON=other/bin/python python -m benchmarks.minimize [--real]

picire's ddmin and Hypothesis choose among the steps of the case, Hypothesis having first to find a choice that fails; shrinkray
shrinks its JSON. Every tool asks the same predicate, 5,000 times at most (300 for a real fault, where an answer is a run in a
child); what is no valid case is not counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from isolate import case as cases
from isolate.case import Case
from isolate.errors import CaseError, IsolateError
from isolate.replay.supervisor import Supervisor
from isolate.search import passes
from isolate.search.needs import tokens
from isolate.search.pin import wanted
from isolate.search.reduce import Exhausted, Reducer
from isolate.search.without import with_steps
from tests.planted_rules import RULES, start

ROOT = Path(__file__).parent.parent
SHRINKRAY = os.environ.get("SHRINKRAY_PYTHON", "")


@dataclass(frozen=True)
class Finding:
    """A case, what it must keep, and how often that may be asked."""

    name: str
    case: Case
    holds: Callable[[Case], bool]
    most: int


class Asked:
    """A predicate that counts, and keeps the smallest case it held for."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.best = finding.case
        self.count = 0

    def __call__(self, case: Case | None) -> bool:
        if case is None:
            return False
        if self.count >= self.finding.most:
            raise Exhausted
        self.count += 1
        held = self.finding.holds(case)
        if held and passes.size(case) < passes.size(self.best):
            self.best = case
        return held


def isolate(asked: Asked) -> None:
    """The reducer with the passes that know a case."""
    Reducer(asked.best, asked, passes.size, passes.content).run(passes.PASSES)


def picire(asked: Asked) -> None:
    """Delta debugging of the list of steps."""
    from picire import DD, Outcome

    began = asked.best
    logging.getLogger("picire").setLevel(logging.ERROR)

    def test(config: list[int], _: object) -> Outcome:
        case = with_steps(began, [began.steps[index] for index in config])
        return Outcome.FAIL if asked(case) else Outcome.PASS

    DD(test)(list(range(len(began.steps))))


def hypothesis(asked: Asked) -> None:
    """Hypothesis's shrinker over lists of the steps' numbers."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    began = asked.best
    numbers = st.lists(st.integers(0, len(began.steps) - 1), unique=True).map(sorted)
    chosen = settings(max_examples=asked.finding.most, database=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)  # fmt: skip
    try:
        find(
            numbers, lambda config: asked(with_steps(began, [began.steps[index] for index in config])), settings=chosen
        )
    except NoSuchExample:
        return


def shrinkray(asked: Asked) -> None:
    """shrinkray on the JSON, in a Python of its own."""
    program = [SHRINKRAY, str(Path(__file__).with_name("ask_shrinkray.py"))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            said = b64encode(msgspec.json.encode(asked.best)).decode()
            while True:
                process.stdin.write(f"{said}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    return
                said = "1" if asked(_case(b64decode(line))) else "0"
        finally:
            process.kill()


def _case(data: bytes) -> Case | None:
    try:
        return cases.parse(data, "candidate")
    except CaseError:
        return None


TOOLS: tuple[Callable[[Asked], None], ...] = (isolate, picire, shrinkray, hypothesis)


def planted() -> Iterator[Finding]:
    """The faults that tests plant in a server's run of 111 steps, each with its known least."""
    for rule in RULES:
        yield Finding(rule.name, replace(start()), rule.holds, 5000)


def real(children: Supervisor) -> Iterator[Finding]:
    """The faults of the released build that `cases/reports` shows on a CPU."""
    for path in sorted((ROOT / "cases/reports").glob("*.json")):
        case = cases.read(path)
        if wanted(case, "cpu") is None:
            continue
        fault = children.run(case).fault
        assert fault is not None, path

        def holds(case: Case, signature: object = fault.signature) -> bool:
            try:
                found = children.run(case).fault
            except IsolateError:
                return False
            return found is not None and found.signature == signature

        yield Finding(path.stem, case, holds, 300)


def measure(tool: Callable[[Asked], None], findings: Iterator[Finding]) -> str:
    """What one tool asked and left."""
    counts, steps, left, reached = [], [], [], 0
    least = {rule.name: (rule.steps, rule.tokens) for rule in RULES}
    for finding in findings:
        asked = Asked(finding)
        with contextlib.suppress(Exhausted):
            tool(asked)
        counts.append(asked.count)
        steps.append(len(asked.best.steps))
        left.append(tokens(asked.best))
        reached += (steps[-1], left[-1]) == least.get(finding.name)
    known = f"  {reached} of {len(counts)} at the least" if reached else ""
    return (
        f"{tool.__name__:<11} {median(counts):>7.0f} asked  {sum(counts):>7} in all  {sum(steps):>5} steps  "
        f"{sum(left):>6} tokens{known}"
    )


def main() -> None:
    """A line a tool."""
    with ExitStack() as stack:
        children = stack.enter_context(Supervisor()) if "--real" in sys.argv else None
        for tool in TOOLS:
            if tool is shrinkray and not SHRINKRAY:
                print("shrinkray   not run: SHRINKRAY_PYTHON names no Python 3.12 that has it")
                continue
            print(measure(tool, real(children) if children else planted()), flush=True)


if __name__ == "__main__":
    main()
