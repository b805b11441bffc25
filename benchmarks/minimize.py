"""What shrinking costs against general tools: predicates asked and the size left, for planted faults of a long case.

    pip install picire
    python -m benchmarks.minimize

picire's ddmin and Hypothesis choose among the steps of the case, Hypothesis having first to find a choice that fails. Every tool
asks the same predicate and may ask it 5,000 times.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from statistics import median

from msgspec.structs import replace

from isolate.case import Case
from isolate.search import passes
from isolate.search.needs import tokens
from isolate.search.reduce import Exhausted, Reducer
from isolate.search.without import with_steps
from tests.planted_rules import RULES, start

MOST = 5000


class Asked:
    """A predicate that counts, and keeps the smallest case it held for."""

    def __init__(self, holds: Callable[[Case], bool], best: Case) -> None:
        self.holds = holds
        self.best = best
        self.count = 0

    def __call__(self, case: Case | None) -> bool:
        if case is None:
            return False
        if self.count >= MOST:
            raise Exhausted
        self.count += 1
        held = self.holds(case)
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
    chosen = settings(max_examples=MOST, database=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck), derandomize=True)  # fmt: skip
    try:
        find(
            numbers, lambda config: asked(with_steps(began, [began.steps[index] for index in config])), settings=chosen
        )
    except NoSuchExample:
        return


TOOLS: tuple[Callable[[Asked], None], ...] = (isolate, picire, hypothesis)


def main() -> None:
    """A line a tool: medians over the planted faults, and how many reached the least that is known."""
    for tool in TOOLS:
        counts, steps, left, reached = [], [], [], 0
        for rule in RULES:
            asked = Asked(rule.holds, replace(start()))
            with contextlib.suppress(Exhausted):
                tool(asked)
            counts.append(asked.count)
            steps.append(len(asked.best.steps))
            left.append(tokens(asked.best))
            reached += (steps[-1], left[-1]) == (rule.steps, rule.tokens)
        print(
            f"{tool.__name__:<11} {median(counts):>7.0f} asked  {sum(counts):>7} in all  {median(steps):>4.0f} steps  "
            f"{median(left):>5.0f} tokens  {reached} of {len(RULES)} at the least"
        )


if __name__ == "__main__":
    main()
