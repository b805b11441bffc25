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
#: Elements among which a logarithm is no gain.
FEW = 2


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


def keep_needed(
    reducer: Reducer[Item], length: Callable[[Item], int], only: Callable[[Item, list[int]], Item | None]
) -> None:
    """Keep elements that are needed: one after the other, each found as the one where the shortest end that will do begins.

    The first is looked for from the end on, by fourfold steps; all by bisection, so that each costs a logarithm. `only(item, places)`
    is the item with these elements alone, None where it cannot be.
    """
    start, total = reducer.best, length(reducer.best)
    needed: list[int] = []

    def will_do(count: int) -> bool:
        candidate = only(start, [*needed, *range(total - count, total)])
        return candidate is not None and (reducer.first([candidate]) is not None or candidate == reducer.best)

    left = total
    low, high = 0, 1
    while high < left and not will_do(high):
        low, high = high, min(4 * high, left)
    # among a few it costs less to leave out one after the other
    while left > FEW:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if will_do(middle) else (middle, high)
        if high == 0:
            return
        needed.append(total - high)
        left = high - 1
        low, high = -1, left


def halve(reducer: Reducer[Item], count: int, least: int, with_count: Callable[[int], Item | None]) -> int:
    """Bring a count of the best near the least that is interesting, or above ALL_TRIED to one that has a boring predecessor."""
    for number in sorted({least, ALL_TRIED}):
        if least <= number < count and reducer.first([with_count(number)]) is not None:
            return number
    low, high = max(least, ALL_TRIED) + 1, count
    while low < high:
        middle = (low + high) // 2
        if reducer.first([with_count(middle)]) is None:
            low = middle + 1
        else:
            high = middle
    return max(high, min(count, least))


def lower(reducer: Reducer[Item], count: int, least: int, with_count: Callable[[int], Item | None]) -> int:
    """Bring a count of the best down to the least that is interesting; returns it.

    All counts up to ALL_TRIED are tried, from the smallest on. Above them the predecessor is, and bisection finds the least where
    interest is monotone.
    """
    small = range(least, min(count, ALL_TRIED + 1))
    taken = reducer.first(with_count(number) for number in small)
    if taken is not None:
        return small[taken]
    if count - 1 <= max(ALL_TRIED, least) or reducer.first([with_count(count - 1)]) is None:
        return count
    return halve(reducer, count - 1, least, with_count)
