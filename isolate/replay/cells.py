"""The cells in a saved state, by position: two states that hold the same are equal here, whatever order their cells were in.

The format is llama.cpp's own (`state_write` of llama-kv-cache.cpp and llama-memory-recurrent.cpp), which no header promises.
What cannot be read to the last byte as that is given back whole, to be compared as it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import product

import numpy as np

#: More cells or layers than any cache has: a number beyond is no count.
_MANY = 1 << 24
#: What newer builds put before a state in memory: `io_magic` of llama-context.cpp, and the slot it was taken of.
_MAGIC = bytes.fromhex("d83c14af")
_HEADER = 8


@dataclass(frozen=True)
class State:
    """A state's caches of cells in the order of positions, and the bytes after them."""

    #: for each cache: positions, and the bytes of every row sorted like them
    caches: tuple[tuple[tuple[int, ...], bytes], ...]
    rest: bytes
    #: for each cache: positions in the order of its cells, which says nothing about what is held
    stored: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions in the first cache."""
        return self.caches[0][0] if self.caches else ()


def read(data: bytes, caches: int, recurrent: bool) -> State | None:
    """The state in `data`, which holds that many caches of cells and then perhaps recurrent state; None where it does not.

    What differs between builds and models is tried out, for only one way reads all: a header of magic and slot, extra bytes a
    cell (M-RoPE), caches without V (MLA).
    """
    headers = (_HEADER, 0) if data[:4] == _MAGIC else (0,)
    for header, extra, values in product(headers, (0, 8, 12), (True, False)):
        cursor = _Cursor(data, header)
        try:
            found = tuple(_cache(cursor, extra, values) for _ in range(caches))
            in_order = tuple((positions, content) for positions, content, _ in found)
            rest = data[cursor.at :]
            if recurrent:
                _check_recurrent(_Cursor(rest, 0))
            elif rest:
                continue
        except (struct.error, ValueError):
            continue
        return State(in_order, rest, tuple(stored for _, _, stored in found))
    return None


def _check_recurrent(cursor: _Cursor) -> None:
    """ValueError where what follows is no recurrent state of one slot."""
    cells = cursor.number("I")
    if cells == 1:
        cursor.number("i")
    if cells > 1 or (cells == 1 and cursor.number("I") != 0) or cursor.number("I") != 0:
        raise ValueError("no recurrent state")
    cursor.count()


class _Cursor:
    """Numbers and bytes, one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return int(value)

    def count(self, kind: str = "I") -> int:
        value = self.number(kind)
        if value > _MANY:
            raise ValueError("no count")
        return value

    def array(self, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        size = int(np.prod(shape, dtype=np.int64))
        if self.at + size > len(self.data):
            raise ValueError("too short")
        self.at += size
        return np.frombuffer(self.data, np.uint8, size, self.at - size).reshape(shape)


def _cache(cursor: _Cursor, extra: int, values: bool) -> tuple[tuple[int, ...], bytes, tuple[int, ...]]:
    positions: list[int] = []
    stored: list[int] = []
    rows: list[bytes] = []
    for _ in range(cursor.count()):
        cells = cursor.count()
        if cells == 0:
            continue
        places = []
        for _ in range(cells):
            places.append(cursor.number("i"))
            if cursor.number("I") != 1:
                raise ValueError("cells of one slot belong to one")
            rows.append(cursor.array(extra).tobytes())
            # the slot's own number is not part of what it holds
            cursor.array(4)
        order = np.argsort(places, kind="stable")
        rows[-cells:] = [rows[len(rows) - cells + index] for index in order]
        positions += sorted(places)
        stored += places
        transposed, layers = cursor.count(), cursor.count()
        for part in range(2 if values else 1):
            for _ in range(layers):
                kind = cursor.number("i")
                if part == 1 and transposed:
                    element, width = cursor.count(), cursor.count()
                    table = cursor.array(width, cells, element)[:, order]
                else:
                    table = cursor.array(cells, cursor.count("Q"))[order]
                rows.append(kind.to_bytes(4, "little", signed=True) + table.tobytes())
    return tuple(positions), b"".join(rows), tuple(stored)
