"""What one row of attention reads: keys and values, through its mask; and how that differs from what it should read.

Cells are told apart by what they hold: a key and a value of the slot alone are looked for among all the cells that the node can
read, and among those that its row of the mask lets through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isolate.replay.cause import AGREE, CELLS, Cause, Side
from isolate.replay.rows import in_words, same_lines
from isolate.trace.tensors import Values

Chosen = npt.NDArray[np.bool_]

_KEYS, _VALUES = CELLS
#: NMSE up to which two cells hold the same, by the type of the cache: what a rounding that tips over changes.
_SAME = {"f32": 1e-9, "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-3}
_SAME_ELSE = 3e-2


@dataclass(frozen=True)
class Attention:
    """What one row of attention reads: keys and values, a line a cell, and which cells its mask lets through."""

    keys: Values
    values: Values | None
    attended: Chosen


def attention(side: Side, position: int) -> Attention | None:
    """What the row of a position reads of attention's cells; None where the node does not read them."""
    keys = values = mask = None
    for seen, place, base in side.reads():
        copied = seen.inputs[place]
        if seen.tensor.op == "FLASH_ATTN_EXT":
            if place == 1:
                keys = np.moveaxis(copied, 1, 0)
            elif place == 2:
                values = np.moveaxis(copied, 1, 0)
            elif place == 3:
                mask = copied
        elif seen.tensor.op == "MUL_MAT" and place == 0 and base.startswith(_KEYS) and keys is None:
            keys = np.moveaxis(copied, 1, 0)
        elif seen.tensor.op == "MUL_MAT" and place == 0 and base.startswith(_VALUES):
            values = copied
        elif seen.tensor.op == "SOFT_MAX" and place == 1:
            mask = copied
    if keys is None or mask is None or mask.shape[0] != keys.shape[0]:
        return None
    streams = mask.shape[3]
    a_stream = side.ubatch.count // streams
    row, stream = side.row(position) % a_stream, side.row(position) // a_stream
    return Attention(_lines(keys, stream), None if values is None else _lines(values, stream), _seen(mask, row, stream))


def _lines(cells: npt.NDArray[Any], stream: int) -> Values:
    one = cells[..., min(stream, cells.shape[3] - 1)]
    return np.nan_to_num(one.reshape(one.shape[0], -1).astype(np.float32))


def _seen(mask: npt.NDArray[Any], row: int, stream: int) -> Chosen:
    found: Chosen = mask[:, row, 0, stream] > -1e30
    return found


def judge(mine: Side, alone: Side, position: int, cache: str) -> Cause | None:
    """What is wrong with the cells that a position's row attends; None where it attends none. `cache`: the type of the cache."""
    here, right = attention(mine, position), attention(alone, position)
    if here is None or right is None:
        return None
    limit = _SAME.get(cache, _SAME_ELSE)
    keys = same_lines(right.keys[right.attended], here.keys, limit)
    values = keys
    if here.values is not None and right.values is not None:
        values = same_lines(right.values[right.attended], here.values, limit)
    places = _places(alone, right, position)
    return _told(keys, values, here.attended, places, *_held(mine, alone, right, position))


def _places(alone: Side, right: Attention, position: int) -> list[int]:
    """The positions of the cells that the slot alone attends: a new context fills its cells in order."""
    count = int(right.attended.sum())
    earlier = [at for at in sorted(set(alone.held[0]) if alone.held else ()) if at <= position]
    return earlier[-count:] if len(earlier) >= count else [-1] * count


def _held(mine: Side, alone: Side, right: Attention, position: int) -> tuple[frozenset[int] | None, int]:
    """Positions that the slot has cells of, in the cache that is read here, and how many cells up to a position; None: unknown."""
    if mine.held is None or alone.held is None:
        return None, 0
    earlier = sum(at <= position for at in alone.held[0])
    # layers with a window have the second cache; while it reaches to the beginning, no cache can be told from the other
    caches = mine.held[1:] if len(mine.held) > 1 and int(right.attended.sum()) < earlier else mine.held
    count = max(sum(at <= position for at in cache) for cache in caches)
    return frozenset.intersection(*map(frozenset, caches)), count


def _told(
    keys: Chosen, values: Chosen, attended: Chosen, places: list[int], held: frozenset[int] | None, count: int
) -> Cause:
    """`keys`, `values`: for each cell that is right (first dimension), which cells hold the same; `places`: its position."""
    both = keys & values
    found = (both & attended).any(axis=1)
    extra = int(attended.sum()) - int(found.sum())
    evidence: dict[str, Any] = {"attended": int(attended.sum()), "attended_alone": len(places)}
    if found.all() and extra == 0:
        return AGREE
    # what another slot holds may be equal: it is hidden only where the slot has a cell of it
    owned = np.array([held is None or place in held for place in places], np.bool_)
    groups = {
        "hidden": ~found & both.any(axis=1) & owned,
        "other_keys": (values & attended).any(axis=1) & ~(keys & attended).any(axis=1),
        "other_values": (keys & attended).any(axis=1) & ~(values & attended).any(axis=1),
    }
    groups["lost"] = ~found & ~(groups["hidden"] | groups["other_keys"] | groups["other_values"])
    groups["other_keys"] &= ~groups["hidden"]
    groups["other_values"] &= ~groups["hidden"]
    which = {name: [places[int(index)] for index in np.flatnonzero(chosen)] for name, chosen in groups.items()}
    evidence |= {name: positions for name, positions in which.items() if positions}
    told = f"its row attends {int(attended.sum())} cells, {len(places)} when alone"
    if which["hidden"] or found.all():
        foreign = held is None or int(attended.sum()) > count
        parts = [f"hides {in_words(which['hidden'])}, which the slot has"] if which["hidden"] else []
        if extra > 0:
            parts.append(f"lets {extra} cell{'s' if extra > 1 else ''} through that are none of its own")
        if not which["hidden"] and not foreign:
            return Cause("cell", f"the slot has cells in its cache that it should not have: {told}", evidence)
        return Cause("mask", f"its mask is wrong: {told}; it {' and '.join(parts)}", evidence)
    said = []
    if which["other_keys"]:
        said.append(
            f"the keys of {in_words(which['other_keys'])} are others and the values right, as when turned wrongly"
        )
    if which["other_values"]:
        said.append(f"the values of {in_words(which['other_values'])} are others and the keys right")
    if which["lost"]:
        gone = held is not None and not held.intersection(which["lost"])
        said.append(
            f"{'there is no cell of' if gone else 'something else is in the cell of'} {in_words(which['lost'])}"
        )
    return Cause("cell", f"its inputs already differed, in the cache: {'; '.join(said)} ({told})", evidence)
