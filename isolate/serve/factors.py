"""What faults follow: the fewest settings whose values alone tell rows that fail from rows that pass.

Only rows that were run count. A set of factors explains the table when no two rows agree in all of them and differ in
how they ended; the smallest such sets are tried first, so a factor that separates exactly is found before any pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

#: Sets larger than this say nothing that a person could use.
MOST = 4


@dataclass(frozen=True)
class Observed:
    """A row that was run: the value of each factor, and whether it failed."""

    factors: Mapping[str, Any]
    failed: bool


def separating(rows: Sequence[Observed]) -> list[tuple[str, ...]]:
    """All smallest sets of factors that separate failing rows from passing ones; none where nothing does, or all end alike."""
    if len({row.failed for row in rows}) < 2:
        return []
    names = _varied(rows)
    for size in range(1, min(MOST, len(names)) + 1):
        found = [chosen for chosen in combinations(names, size) if _explains(chosen, rows)]
        if found:
            return found
    return []


def _varied(rows: Sequence[Observed]) -> list[str]:
    return [name for name in rows[0].factors if len({row.factors[name] for row in rows}) > 1]


def _explains(chosen: tuple[str, ...], rows: Sequence[Observed]) -> bool:
    ended: dict[tuple[Any, ...], bool] = {}
    return all(ended.setdefault(tuple(row.factors[name] for name in chosen), row.failed) == row.failed for row in rows)


def sentence(rows: Sequence[Observed]) -> str:
    """One sentence on what the faults follow; "" where there were not both passes and faults."""
    failed = sum(row.failed for row in rows)
    if not 0 < failed < len(rows):
        return ""
    counted = f"{failed} of {len(rows)} rows that ran failed"
    found = separating(rows)
    if not found:
        return f"{counted}; no set of up to {MOST} settings separates them from the others"
    first, *others = (" with ".join(f"--{name}" for name in chosen) for chosen in found)
    also = f" (so {'does' if len(others) == 1 else 'do'} {', '.join(others)})" if others else ""
    clear = [name for name in _varied(rows) if not any(name in chosen for chosen in found)]
    rest = f", not {', '.join(f'--{name}' for name in clear)}" if clear else ""
    return f"{counted}: the faults follow {first}: {_values(found[0], rows)}{also}{rest}"


def _values(chosen: tuple[str, ...], rows: Sequence[Observed]) -> str:
    def said(failed: bool) -> str:
        values = {tuple(row.factors[name] for name in chosen): None for row in rows if row.failed is failed}
        shown = [" with ".join(_word(value) for value in each) for each in values]
        return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")

    return f"rows with {said(True)} failed, rows with {said(False)} passed"


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
