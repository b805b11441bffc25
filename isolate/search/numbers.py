"""A pass for the reducer that makes the numbers in steps small: where a range begins and ends, how far a shift goes."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from isolate.case import Case, SeqAdd, SeqCp, SeqRm
from isolate.search.reduce import Reducer, lower
from isolate.search.without import with_steps

_RANGES = (SeqRm, SeqCp, SeqAdd)


def total(case: Case) -> int:
    """All of them together: a part of the sort key."""
    steps = [step for step in case.steps if isinstance(step, _RANGES)]
    shifts = [step.delta for step in steps if isinstance(step, SeqAdd)]
    return sum(max(step.p0, 0) + max(step.p1, 0) for step in steps) + sum(map(abs, shifts))


def small_numbers(reducer: Reducer[Case]) -> None:
    """Ranges near the beginning of a slot, and shifts by little."""
    for index, step in enumerate(reducer.best.steps):
        if not isinstance(step, _RANGES):
            continue
        for name in ("p0", "p1", "delta"):
            # an earlier number may have changed it
            step = reducer.best.steps[index]
            number = getattr(step, name, 0)
            least = max(getattr(step, "p0", 0), 0) + 1 if name == "p1" else 1
            sign = -1 if number < 0 else 1

            def with_number(count: int, index: int = index, name: str = name, sign: int = sign) -> Case | None:
                steps: list[Any] = list(reducer.best.steps)
                steps[index] = replace(steps[index], **{name: sign * count})
                return with_steps(reducer.best, steps)

            if sign * number > least and (number > 0 or name == "delta"):
                lower(reducer, sign * number, least, with_number)
