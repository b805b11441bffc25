"""Faults of checkpoints and saved states."""

from __future__ import annotations

import ctypes
import hashlib
import os
from typing import Any

from tests.mutants.layer import PARTIAL, POSITION_AT, Faulty


def _raw(data: Any, size: int) -> bytes:
    return ctypes.string_at(data, size)


class RestoreDropsTheLastCell(Faulty):
    """A restore drops the last cell."""

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().put(data, size, slot, flags)
        self.drop(slot, self.end(slot) - 1, -1)
        return moved


class RestoreIntoTheWrongSlot(Faulty):
    """A restore goes to the slot after the one that was meant."""

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        return super().put(data, size, (slot + 1) % len(self.slots), flags)


class CheckpointOneTokenLate(Faulty):
    """A checkpoint of recurrent layers is copied only after the next decode: it has seen its tokens too."""

    def begin(self) -> None:
        self.late: list[tuple[Any, int, int]] = []

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().take(data, size, slot, flags)
        if self.recurrent and flags & PARTIAL and self.end(slot) > 0:
            self.late.append((data, moved, slot))
        return moved

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        for data, size, slot in self.late:
            now = self.state(slot, PARTIAL)
            if len(now) == size:
                after = POSITION_AT + 4
                ctypes.memmove(ctypes.addressof(data) + after, now[after:], size - after)
        self.late.clear()
        return code


class RestoreTakesACellOfAnotherSlot(Faulty):
    """A restore takes the newest cell of another slot."""

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().put(data, size, slot, flags)
        for other in self.others(slot)[:1]:
            self.drop(other, self.end(other) - 1, -1)
        return moved


class StateSetOnlyOnce(Faulty):
    """A state that is set a second time leaves an empty slot."""

    def begin(self) -> None:
        self.seen: set[bytes] = set()

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().put(data, size, slot, flags)
        key = hashlib.sha1(_raw(data, size)).digest()
        if key in self.seen:
            self.drop(slot, -1, -1)
        self.seen.add(key)
        return moved


class StateOfTheFirstSlotOfEqualLength(Faulty):
    """The state of a slot is that of the first slot that has as many cells."""

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        alike = (
            other for other in self.slots if (self.end(other), self.count(other)) == (self.end(slot), self.count(slot))
        )
        first = next(alike, slot)
        return super().take(data, size, first if self.size(first, flags) == size else slot, flags)


class LongStateIsCutInside(Faulty):
    """The newest bytes of a state of more than 32 cells are zero."""

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().take(data, size, slot, flags)
        if self.count(slot) > 32 and not self.recurrent and moved > 4096:
            ctypes.memset(ctypes.addressof(data) + moved - 4096, 0, 2048)
        return moved


class LoadIntoAnotherSlotMoves(Faulty):
    """A state set into another slot than it was taken of stands one position further."""

    def begin(self) -> None:
        self.taken_of: dict[bytes, int] = {}

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().take(data, size, slot, flags)
        self.taken_of.setdefault(hashlib.sha1(_raw(data, moved)).digest(), slot)
        return moved

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().put(data, size, slot, flags)
        if self.taken_of.get(hashlib.sha1(_raw(data, size)).digest(), slot) != slot:
            self.move(slot, -1, -1)
        return moved


class RestoreGivesTheNewestCheckpoint(Faulty):
    """A restore into a slot sets the newest state that was taken of it, whichever was asked for."""

    def begin(self) -> None:
        self.newest_of: dict[tuple[int, int], bytes] = {}

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().take(data, size, slot, flags)
        self.newest_of[slot, flags] = _raw(data, moved)
        return moved

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        newest = self.newest_of.get((slot, flags))
        if newest is None:
            return super().put(data, size, slot, flags)
        self.set_state(newest, slot, flags)
        return size


class CheckpointIgnoresPartialOnly(Faulty):
    """A checkpoint is the whole state, though only the part that cannot be rolled back was asked for."""

    def size(self, slot: int, flags: int) -> int:
        return super().size(slot, flags & ~PARTIAL)

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        return super().take(data, size, slot, flags & ~PARTIAL)


class LongStateLosesItsMiddle(Faulty):
    """A state of more than 20 cells loses one in the middle when it is set."""

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        moved = super().put(data, size, slot, flags)
        if self.count(slot) > 20:
            self.hole(slot, self.end(slot) - 10)
        return moved


class FileOfASlotGoesToTheFirst(Faulty):
    """A state in a file is always loaded into slot 0."""

    def put_file(self, path: bytes, slot: int, tokens: Any, capacity: int, count: Any) -> int:
        return super().put_file(path, 0, tokens, capacity, count)


class RestoreLeaksACell(Faulty):
    """Each restore leaks a cell: a decode that needs the last cells finds no room."""

    def begin(self) -> None:
        self.leaked = 0

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        self.leaked += not self.recurrent
        return super().put(data, size, slot, flags)

    def decode(self, batch: Any) -> int:
        held = [self.count(slot) + sum(fed.slot == slot for fed in self.fed) for slot in self.slots]
        most = sum(held) if self.params.kv_unified else max(held)
        return 1 if self.leaked and most + self.leaked > self.room() else super().decode(batch)


class MixedBatchAfterARestoreAborts(Faulty):
    """A restore that is followed by a batch of 5 to 8 tokens of several slots aborts."""

    def begin(self) -> None:
        self.restored = False

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        self.restored = True
        return super().put(data, size, slot, flags)

    def decode(self, batch: Any) -> int:
        if self.restored and 5 <= len(self.fed) <= 8 and len({fed.slot for fed in self.fed}) > 1:
            os.abort()
        self.restored = False
        return super().decode(batch)


class RemovingAnEmptySlotAfterARestoreDies(Faulty):
    """Removing an empty slot reads from nowhere when the call before was a restore."""

    def begin(self) -> None:
        self.restored = False

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        self.restored = True
        return super().put(data, size, slot, flags)

    def decode(self, batch: Any) -> int:
        self.restored = False
        return super().decode(batch)

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        if self.restored and slot >= 0 and self.end(slot) == 0:
            ctypes.string_at(8)
        return super().remove(slot, p0, p1)


class TailRemovalAfterARestoreIsRefused(Faulty):
    """Removing what lies beyond a restored state is refused."""

    def begin(self) -> None:
        self.restored = -1

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        self.restored = slot
        return super().put(data, size, slot, flags)

    def decode(self, batch: Any) -> int:
        self.restored = -1
        return super().decode(batch)

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        return False if slot == self.restored and p0 > 0 else super().remove(slot, p0, p1)


class RestoreInTheMiddleOfAPrompt(Faulty):
    """A restore between two parts of another slot's prompt loses a cell of the first part."""

    def begin(self) -> None:
        self.last: dict[int, int] = {}
        self.between: set[int] = set()

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        self.between = {other for other, count in self.last.items() if other != slot and count > 2}
        return super().put(data, size, slot, flags)

    def decode(self, batch: Any) -> int:
        counts: dict[int, int] = {}
        for fed in self.fed:
            counts[fed.slot] = counts.get(fed.slot, 0) + 1
        for slot in self.between & {slot for slot, count in counts.items() if count > 1}:
            self.hole(slot, self.end(slot) - 2)
        self.last, self.between = counts, set()
        return super().decode(batch)
