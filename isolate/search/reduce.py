"""The reducer: something to shrink, a predicate it must keep, and a sort key that says what is smaller. It knows no format.

A pass is a plain function, named for what it removes, that offers smaller things to `Reducer.first`. Passes are repeated
until a whole round of them changes nothing: what is left is then minimal as far as they can see. Nothing is left to chance,
so the same start and the same verdicts give the same end, whatever is tried at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
#: Counts up to this one are all tried: a fault may need 6 to 8 of something and be absent at 5, 9 and 100.
ALL_TRIED = 16


class Exhausted(Exception):
    """The budget is spent: raised by a predicate instead of a verdict."""


class Reducer(Generic[Item]):
    """The best so far. `interesting` is asked once about each content; `key` orders, smaller is better."""

    def __init__(
        self,
        start: Item,
        interesting: Callable[[Item], bool],
        key: Callable[[Item], Any],
        content: Callable[[Item], Hashable] = repr,
        at_once: int = 1,
    ) -> None:
        self.best = start
        self.interesting = interesting
        self.key = key
        self.content = content
        self.at_once = at_once
        self._boring: set[Hashable] = set()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, passes: Sequence[Callable[[Reducer[Item]], None]]) -> bool:
        """Repeat the passes until a round changes nothing. False where the budget was spent before that was seen."""
        with ThreadPoolExecutor(self.at_once) as self._pool:
            try:
                while True:
                    before = self.best
                    for remove in passes:
                        remove(self)
                    if self.best is before:
                        return True
            except Exhausted:
                return False

    def first(self, candidates: Iterable[Item | None]) -> int | None:
        """Make the first candidate that is smaller and interesting the best; its place among them, None without one."""
        worth = self._worth_trying(candidates)
        while window := list(islice(worth, self.at_once)):
            for place, item, verdict in self._verdicts(window):
                if verdict():
                    self.best = item
                    return place
                self._boring.add(self.content(item))
        return None

    def _worth_trying(self, candidates: Iterable[Item | None]) -> Iterator[tuple[int, Item]]:
        """Those that are smaller than the best and were not tried before."""
        for place, item in enumerate(candidates):
            if item is not None and self.key(item) < self.key(self.best) and self.content(item) not in self._boring:
                yield place, item

    def _verdicts(self, window: list[tuple[int, Item]]) -> Iterator[tuple[int, Item, Callable[[], bool]]]:
        if self._pool is None or len(window) == 1:
            for place, item in window:
                yield place, item, lambda item=item: self.interesting(item)  # type: ignore[misc]
            return
        asked = [self._pool.submit(self.interesting, item) for _, item in window]
        for (place, item), future in zip(window, asked, strict=True):
            yield place, item, future.result


def drop_ranges(
    reducer: Reducer[Item], length: Callable[[Item], int], without: Callable[[Item, int, int], Item | None]
) -> None:
    """Remove runs of elements, first halves, at last single ones. `without(item, start, stop)` is None where it cannot be."""
    size = length(reducer.best)
    while size:
        start = 0
        while start < length(reducer.best):
            best, total = reducer.best, length(reducer.best)
            starts = range(start, total, size)
            taken = reducer.first(without(best, at, min(at + size, total)) for at in starts)
            if taken is None:
                break
            start = starts[taken]
        size //= 2


def lower(reducer: Reducer[Item], count: int, least: int, with_count: Callable[[int], Item | None]) -> int:
    """Bring a count of the best down to the least that is interesting; returns it.

    All counts up to ALL_TRIED are tried, from the smallest on. Above them bisection finds the least where interest is
    monotone, and in any case a count whose predecessor is not interesting.
    """
    if reducer.first([with_count(least)] if least < count else []) is not None:
        return least
    low, high = max(least + 1, ALL_TRIED + 1), count
    while low < high:
        middle = (low + high) // 2
        if reducer.first([with_count(middle)]) is None:
            low = middle + 1
        else:
            high = middle
    small = range(least + 1, min(high, ALL_TRIED + 1))
    taken = reducer.first(with_count(number) for number in small)
    return high if taken is None else small[taken]
