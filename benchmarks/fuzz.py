"""What generated cases cost: a second of one core, against a loop that starts a process a case, and guided against by chance.

python -m benchmarks.fuzz [SHARES]
python -m benchmarks.fuzz guided [SEEDS [NAME...]]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from statistics import median

from isolate.case import Case
from isolate.fault import Fault
from isolate.search.executors import processes
from isolate.search.fuzz import Space
from isolate.search.shard import Plan, _Runner, end_children
from tests.mutants.catalogue import MUTANTS
from tests.mutants.score import Hunted, hunt

SHARES = 12
#: Cases that the loop runs which starts a process for each.
LOOPED = 40
JOBS = 2
MOST = 600


class _Unreduced(_Runner):
    """A share whose faults are counted, not reduced."""

    def _examine(self, case: Case, fault: Fault) -> None:
        pass


def seconds() -> float:
    """Seconds of a core that this process and its children that ended have had, which other programs do not change."""
    return sum(os.times()[:4])


def shares(count: int, worker: str = "isolate.replay.worker") -> tuple[int, int, float]:
    """Cases, steps and seconds of the first shares of a campaign in one warm child."""
    started = seconds()
    kept: list[Case] = []
    seen: set[str] = set()
    cases = steps = 0
    for number in range(count):
        share = _Unreduced(Plan(1, Space(), worker=worker), number, (), kept[-400:], frozenset(seen)).run()
        cases, steps = cases + share.cases, steps + share.steps
        kept += share.kept
        seen |= set(share.facts)
    end_children()
    return cases, steps, seconds() - started


def looped(folder: Path) -> float:
    """Seconds a case where each has a process of its own: a loop over `isolate run` with the same oracles."""
    runner = _Unreduced(Plan(1, Space()), 0, (), (), frozenset())
    cases = [case for case, _ in runner._cases()][:LOOPED]
    started = seconds()
    for case in cases:
        case.write(folder / "case.json")
        command = [sys.executable, "-c", "from isolate.cli import main; main()", "run", str(folder / "case.json")]
        command += ["--check", "all"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    return (seconds() - started) / len(cases)


def cost(count: int) -> None:
    """Print cases and steps a second of a core, the library's share, and how much a process a case would cost."""
    cases, steps, spent = shares(count)
    print(f"{cases} cases, {steps} steps: {cases / spent:.1f} cases, {steps / spent:.0f} steps a second of a core")
    own = os.times()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TIMED"] = str(Path(folder, "timed"))
        _, _, timed = shares(count, "benchmarks.timed_worker")
        inside, running = map(float, Path(os.environ["TIMED"]).read_text().split())
        here = sum(os.times()[:2]) - sum(own[:2])
        alone = looped(Path(folder))
    print(
        f"in the library: {inside / running:.0%} of the time cases ran in the child; the parent takes {here / timed:.1%} of all"
    )
    print(f"a process a case: {1 / alone:.2f} cases a second of a core, {alone * cases / spent:.1f} times slower")


def guided(seeds: int, names: list[str]) -> None:
    """Print, for each planted fault, the median over the seeds of the cases and steps to find it, guided and by chance."""
    ratios = []
    with processes(JOBS) as executor:
        hunts: dict[tuple[str, bool], list[Future[Hunted]]] = {
            (name, way): [executor.submit(hunt, name, seed, way, MOST) for seed in range(1, seeds + 1)]
            for name in names
            for way in (True, False)
        }
        for name in names:
            (cases, steps), (others, other_steps) = (
                [median(column) for column in zip(*map(_cost_of, hunts[name, way]), strict=True)]
                for way in (True, False)
            )
            ratios.append((cases / others, steps / other_steps))
            print(
                f"{name:<40} {cases:>5.0f} cases {steps:>6.0f} steps guided {others:>5.0f} {other_steps:>6.0f} by chance",
                f"{ratios[-1][0]:>5.2f} {ratios[-1][1]:>5.2f}",
                flush=True,
            )
    for what, of in zip(("cases", "steps"), zip(*ratios, strict=True), strict=True):
        print(f"{what}: median of the ratios {median(of):.2f}; fewer guided for {sum(r < 1 for r in of)} of {len(of)}")


def _cost_of(hunted: Future[Hunted]) -> tuple[int, int]:
    """Cases and steps until the fault showed, or all that there were."""
    found = hunted.result()
    return found.cases, found.steps


def main() -> None:
    """Measure what was asked for."""
    words = sys.argv[1:]
    if words[:1] == ["guided"]:
        guided(int(words[1]) if len(words) > 1 else 3, words[2:] or list(MUTANTS))
    else:
        cost(int(words[0]) if words else SHARES)


if __name__ == "__main__":
    main()
