"""Numbers in steps are made small as far as the fault lets them, together with the tokens that they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isolate.case import Case, Decode, Model, Pattern, Run, SeqAdd, SeqRm, Step
from isolate.search import passes
from isolate.search.needs import tokens
from isolate.search.reduce import Reducer


def shrunk(holds: Callable[[Case], bool], *steps: Step) -> Case:
    began = Case(isolate=1, model=Model(zoo="llama"), steps=[Decode(batch=[Run(0, Pattern(100, 120))]), *steps])
    assert holds(began)
    reducer = Reducer(began, holds, passes.size, passes.content)
    assert reducer.run(passes.PASSES)
    return reducer.best


def removal(case: Case) -> SeqRm | None:
    return next((step for step in case.steps if isinstance(step, SeqRm)), None)


@pytest.mark.parametrize("least", [1, 5, 16, 17, 40])
def test_a_tail_begins_as_early_as_it_can(least: int) -> None:
    def holds(case: Case) -> bool:
        step = removal(case)
        return step is not None and step.p0 >= least and tokens(case) > step.p0

    best = shrunk(holds, SeqRm(slot=0, p0=77))
    assert removal(best) == SeqRm(slot=0, p0=least)
    assert tokens(best) == least + 1


def test_a_part_is_as_short_and_as_early_as_it_can_be() -> None:
    def holds(case: Case) -> bool:
        step = removal(case)
        return step is not None and 0 < step.p0 < step.p1 < tokens(case) - 1

    best = shrunk(holds, SeqRm(slot=0, p0=43, p1=57))
    assert removal(best) == SeqRm(slot=0, p0=1, p1=2)
    assert tokens(best) == 4


@pytest.mark.parametrize(("delta", "least"), [(30, 4), (-30, -4), (-30, -1)])
def test_a_shift_goes_as_little_as_it_can(delta: int, least: int) -> None:
    def holds(case: Case) -> bool:
        step = next((step for step in case.steps if isinstance(step, SeqAdd)), None)
        return step is not None and step.delta * least > 0 and abs(step.delta) >= abs(least)

    (left,) = shrunk(holds, SeqAdd(slot=0, p0=50, delta=delta)).steps
    assert left == SeqAdd(slot=0, delta=least)
