"""Passes for the reducer over single numbers: where a range begins and ends, how far a shift goes, where a run's tokens begin."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from isolate.case import Case, Decode, Pattern, Run, SeqAdd, SeqCp, SeqRm
from isolate.search.reduce import Reducer, lower
from isolate.search.without import runs_of, with_run, with_steps

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


def last_tokens(reducer: Reducer[Case]) -> None:
    """The last token of each run, or all but its first, where slots need tokens that differ."""
    places = list(runs_of(reducer.best))
    for index, number in places if len(places) > 1 else ():
        step = reducer.best.steps[index]
        assert isinstance(step, Decode)
        run = step.batch[number]
        reducer.first(
            with_run(reducer.best, index, number, _end_of(run, count))
            for count in (1, run.count() - 1)
            if 0 < count < run.count()
        )


def _end_of(run: Run, count: int) -> Run:
    gone = run.count() - count
    if isinstance(run.tokens, Pattern):
        first = (run.tokens.first + gone * run.tokens.stride) % run.tokens.modulo
        return replace(run, tokens=replace(run.tokens, count=count, first=first))
    kept = run.tokens if isinstance(run.tokens, str) else run.tokens[gone:]
    logits = [place - gone for place in run.logits if place >= gone] if isinstance(run.logits, list) else run.logits
    return replace(run, tokens=kept, logits=logits or "last")
