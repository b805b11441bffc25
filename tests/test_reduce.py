"""The reducer over invented predicates: never larger, the predicate kept, minimal where it says so, budgets kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isolate.case import Case, Context, Decode, Load, Model, Reopen, Run, Save
from isolate.search import passes
from isolate.search.needs import tokens
from isolate.search.reduce import ALL_TRIED, Exhausted, Reducer, drop_ranges, lower
from tests.planted_rules import RULES, Rule, start

Numbers = tuple[int, ...]


def size(items: Numbers) -> tuple[int, int]:
    return len(items), sum(items)


def drop(reducer: Reducer[Numbers]) -> None:
    drop_ranges(reducer, len, lambda items, first, last: items[:first] + items[last:])


def lessen(reducer: Reducer[Numbers]) -> None:
    for place in range(len(reducer.best)):
        best = reducer.best

        def with_count(count: int, place: int = place) -> Numbers:
            return (*reducer.best[:place], count, *reducer.best[place + 1 :])

        lower(reducer, best[place], 0, with_count)


PASSES = (drop, lessen)


class Predicate:
    """Counts what it was asked, and refuses after `budget`."""

    def __init__(self, holds: Callable[[Numbers], bool], budget: int = 10**9) -> None:
        self.holds = holds
        self.budget = budget
        self.asked: list[Numbers] = []

    def __call__(self, items: Numbers) -> bool:
        if len(self.asked) >= self.budget:
            raise Exhausted
        self.asked.append(items)
        return self.holds(items)


def contains(needed: Sequence[int]) -> Callable[[Numbers], bool]:
    """All of the needed numbers are there, in any order; a predicate that keeps holding when more is added."""
    return lambda items: all(items.count(number) >= needed.count(number) for number in needed)


def strange(modulo: int, least: int) -> Callable[[Numbers], bool]:
    """Holds for some sums and lengths only, without any order."""
    return lambda items: (sum(items) * 7 + len(items)) % modulo == 0 and len(items) >= least


lists = st.lists(st.integers(0, 300), max_size=24).map(tuple)


@given(lists, st.data())
def test_what_is_needed_is_all_that_is_left(items: Numbers, data: st.DataObject) -> None:
    needed = data.draw(st.lists(st.sampled_from(items), unique_by=None, max_size=4) if items else st.just([]))
    needed = [number for number in needed if needed.count(number) <= items.count(number)]
    predicate = Predicate(contains(needed))
    reducer = Reducer(items, predicate, size)
    assert reducer.run([drop])
    assert sorted(reducer.best) == sorted(needed)
    assert len(set(predicate.asked)) == len(predicate.asked)


@given(lists, st.integers(1, 6), st.integers(0, 5))
def test_it_ends_smaller_or_equal_with_the_predicate_and_one_minimal(items: Numbers, modulo: int, least: int) -> None:
    holds = strange(modulo, least)
    if not holds(items):
        return
    reducer = Reducer(items, Predicate(holds), size)
    assert reducer.run(PASSES)
    best = reducer.best
    assert size(best) <= size(items)
    assert holds(best)
    assert not any(holds(best[:place] + best[place + 1 :]) for place in range(len(best)))
    for place, number in enumerate(best):
        for fewer in {number - 1, *range(min(number, ALL_TRIED + 1))} - {-1}:
            if fewer < number:
                assert not holds((*best[:place], fewer, *best[place + 1 :]))


@given(lists, st.integers(1, 6), st.integers(0, 30))
def test_a_budget_is_kept_and_the_best_so_far_with_it(items: Numbers, modulo: int, budget: int) -> None:
    holds = strange(modulo, 0)
    if not holds(items):
        return
    predicate = Predicate(holds, budget)
    reducer = Reducer(items, predicate, size)
    ended = reducer.run(PASSES)
    assert len(predicate.asked) <= budget
    assert ended or len(predicate.asked) == budget
    assert holds(reducer.best)
    assert size(reducer.best) <= size(items)


@given(lists, st.integers(1, 6), st.integers(1, 4))
def test_several_at_once_end_where_one_at_a_time_does(items: Numbers, modulo: int, at_once: int) -> None:
    holds = strange(modulo, 0)
    if not holds(items):
        return
    alone, together = Reducer(items, holds, size), Reducer(items, holds, size, at_once=at_once)
    assert alone.run(PASSES) and together.run(PASSES)
    assert alone.best == together.best


@pytest.mark.parametrize("count", [7, 8, 20, 484, 100_000])
def test_a_count_that_must_be_six_to_eight_is_found_wherever_one_begins(count: int) -> None:
    predicate = Predicate(lambda items: 6 <= items[0] <= 8 or items[0] == count)
    reducer: Reducer[Numbers] = Reducer((count,), predicate, size)
    lower(reducer, count, 1, lambda number: (number,))
    assert reducer.best == (6,)
    assert len(predicate.asked) <= 40


@pytest.mark.parametrize("least", [1, 2, 16, 17, 18, 99, 4711])
def test_a_count_is_brought_down_to_its_threshold(least: int) -> None:
    predicate = Predicate(lambda items: items[0] >= least)
    reducer: Reducer[Numbers] = Reducer((5000,), predicate, size)
    assert lower(reducer, 5000, 1, lambda number: (number,)) == least
    assert reducer.best == (least,)


def test_settings_of_a_context_that_is_made_again_are_shrunk_too() -> None:
    """The fault needs a restart with a unified cache, and a decode at the end."""
    strange = Context(n_ctx=8192, n_batch=64, n_seq_max=4, type_k="q8_0", kv_unified=True, flash_attn_type="enabled")
    decode = Decode(batch=[Run(0, [1, 2, 3])])
    steps = [decode, Save(slot=0, name="a"), Reopen(context=strange), Load(name="a"), Reopen(context=strange), decode]
    began = Case(isolate=1, model=Model(zoo="llama"), context=Context(n_ctx=4096, n_seq_max=2), steps=steps)

    def holds(case: Case) -> bool:
        made = [step.context for step in case.steps if isinstance(step, Reopen)]
        return any(context.kv_unified for context in made) and isinstance(case.steps[-1], Decode)

    reducer = Reducer(began, holds, passes.size, passes.content)
    assert reducer.run(passes.PASSES)
    reopened, last = reducer.best.steps
    assert isinstance(reopened, Reopen) and isinstance(last, Decode)
    assert reopened.context == Context(n_ctx=256, kv_unified=True)
    assert reducer.best.context == Context(n_ctx=256)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_planted_fault_shrinks_to_its_least(rule: Rule, seed: int) -> None:
    began = start(seed)
    assert rule.holds(began)
    asked: list[Case] = []

    def interesting(case: Case) -> bool:
        asked.append(case)
        return rule.holds(case)

    reducer = Reducer(began, interesting, passes.size, passes.content)
    assert reducer.run(passes.PASSES)
    best = reducer.best
    assert rule.holds(best)
    assert passes.size(best) < passes.size(began)
    assert (len(best.steps), tokens(best)) == (rule.steps, rule.tokens)
    assert len(asked) < 400
