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
    return _told(keys, values, here.attended, places, mine.held, position)


def _places(alone: Side, right: Attention, position: int) -> list[int]:
    """The positions of the cells that the slot alone attends: the newest, in the order of its cells."""
    count = int(right.attended.sum())
    should, *stored = alone.held or ((),)
    newest = sorted({at for at in should if at <= position})[-count:]
    if len(newest) < count:
        return [-1] * count
    for cache in stored:
        places = [at for at in cache if at in newest]
        if len(places) == count:
            return places
    # a state that does not say: a new context fills its cells in order
    return newest


def _told(
    keys: Chosen,
    values: Chosen,
    attended: Chosen,
    places: list[int],
    held: tuple[tuple[int, ...], ...] | None,
    position: int,
) -> Cause:
    """`keys`, `values`: for each cell that is right (first dimension), which cells hold the same; `places`: its position.

    `held`: positions in each cache of the slot; which of two a layer reads is not known here.
    """
    both = keys & values
    found: Chosen = np.any(both & attended, axis=1)
    count = int(attended.sum())
    evidence: dict[str, Any] = {"attended": count, "attended_alone": len(places)}
    if found.all() and count == len(places):
        return AGREE
    told = f"its row attends {count} cells, {len(places)} when alone"
    there = [place for place, yes in zip(places, found, strict=True) if yes]
    own = [_own(places, there, cache, position) for cache in held or (None,)]
    # cells that hold nothing of what is right
    free = attended & ~np.any(both[found], axis=0)
    missing = {
        "hidden": ~found & both.any(axis=1),
        "other_keys": ~found & (values & free).any(axis=1),
        "other_values": ~found & (keys & free).any(axis=1),
    }
    which = {name: [places[int(at)] for at in np.flatnonzero(chosen)] for name, chosen in missing.items()}
    lost = [place for place, yes in zip(places, found, strict=True) if not yes]
    if held is None and count != len(places):
        said = f"{told}; whether cells are gone or hidden, too many or another's, this build's state does not tell"
        return Cause("unknown", said, evidence | {"not_attended": lost})
    if not any(count in possible for possible in own):
        hidden = [place for place in which["hidden"] if held is None or any(place in cache for cache in held)]
        extra = count - len(there)
        parts = [f"hides {in_words(hidden)}, which the slot has"] if hidden else []
        parts += [f"lets {extra} cell{'s' if extra > 1 else ''} through that are none of its own"] if extra > 0 else []
        evidence |= {"hidden": hidden, "none_of_its_own": extra}
        return Cause("mask", f"its mask is wrong: {told}; it {' and '.join(parts) or 'is not by positions'}", evidence)
    if not lost:
        said = f"the slot has cells in the cache that it should not have: {told}"
        return Cause("cell", said, evidence | {"too_many": count - len(there)})
    if which["other_keys"] == lost:
        said = f"the keys of {in_words(lost)} are others and the values right, as when turned wrongly"
        evidence["other_keys"] = lost
    elif which["other_values"] == lost:
        said = f"the values of {in_words(lost)} are others and the keys right"
        evidence["other_values"] = lost
    else:
        gone = count < len(places)
        said = f"{'there is no cell of' if gone else 'something else is in the cell of'} {in_words(lost)}"
        evidence["lost" if gone else "other_cells"] = lost
    return Cause("cell", f"its inputs already differed, in the cache: {said} ({told})", evidence)


def _own(places: list[int], there: list[int], held: tuple[int, ...] | None, position: int) -> range:
    """How many cells of its own the slot can have attended: those that are known, and those that may have been given up since.

    A state has only what is in reach of its end, and a later ubatch may have taken cells that this one read.
    """
    if held is None:
        return range(len(places), len(places) + 1)
    inside = [at for at in held if min(places, default=0) <= at <= position]
    known = len(inside) + len(set(there) - set(inside))
    gone = [place for place in places if place < min(held, default=0) and place not in there]
    return range(known, known + len(gone) + 1)
