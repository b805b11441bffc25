"""Faults of the memory calls: removing, copying, shifting, keeping, clearing, and what positions say."""

from __future__ import annotations

from typing import Any

from tests.mutants.layer import PARTIAL, Faulty


class RemovalTakesANeighboursCell(Faulty):
    """Removing a slot's tail also takes the cell of another slot at the same position."""

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        answer = super().remove(slot, p0, p1)
        for other in self.others(slot)[:1] if p0 > 0 else []:
            self.hole(other, p0)
        return answer


class RemovalTakesOneMore(Faulty):
    """Removing a part in the middle of a slot takes one cell more."""

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        more = p0 > 0 and 0 < p1 < self.end(slot) - 1
        return super().remove(slot, p0, p1 + 1 if more else p1)


class RemovalAtAnUbatchEdgeLeavesOne(Faulty):
    """Removing a tail that begins where an ubatch begins leaves its first cell."""

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        edge = p0 > 0 and p1 < 0 and p0 % self.params.n_ubatch == 0
        return super().remove(slot, p0 + 1 if edge else p0, p1)


class CopyShares(Faulty):
    """What is removed from a slot that was copied is removed from the copy as well."""

    def begin(self) -> None:
        self.copies: dict[int, int] = {}

    def copy(self, slot: int, into: int, p0: int, p1: int) -> None:
        super().copy(slot, into, p0, p1)
        self.copies[slot] = into

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        answer = super().remove(slot, p0, p1)
        if answer and slot in self.copies:
            self.drop(self.copies.pop(slot), p0, p1)
        return answer


class CopyLosesTheLastCell(Faulty):
    """A copy of more than one cell lacks the last."""

    def copy(self, slot: int, into: int, p0: int, p1: int) -> None:
        super().copy(slot, into, p0, p1)
        if not self.recurrent and self.count(into) > 1:
            self.drop(into, self.end(into) - 1, -1)


class CopyOfRecurrentStateIsShared(Faulty):
    """A copied slot's recurrent state is shared: what the copy decodes next changes the first slot's too."""

    def begin(self) -> None:
        self.copies: dict[int, int] = {}

    def copy(self, slot: int, into: int, p0: int, p1: int) -> None:
        super().copy(slot, into, p0, p1)
        if self.recurrent:
            self.copies[into] = slot

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        slots = {fed.slot for fed in self.fed}
        for into, slot in list(self.copies.items()):
            if into in slots:
                del self.copies[into]
                if slot not in slots and self.end(slot) > 0:
                    self.set_recurrent(self.state(into, PARTIAL), slot, self.end(slot) - 1)
        return code


class ShiftOfAPartIsOneOff(Faulty):
    """After a part of a slot was shifted its positions are one further."""

    def shift(self, slot: int, p0: int, p1: int, delta: int) -> None:
        super().shift(slot, p0, p1, delta + 1 if p0 > 0 and delta else delta)


class ShiftDoesNotTurnKeys(Faulty):
    """A shift moves the positions of a slot and leaves its keys as they were."""

    def shift(self, slot: int, p0: int, p1: int, delta: int) -> None:
        super().shift(slot, p0, p1, delta)
        if delta and not self.recurrent and self.count(slot) > 0 and p0 <= 0:
            self.set_state(self.state(slot), slot)


class ShiftLeavesTheFirstCell(Faulty):
    """A shift of a part leaves its first cell where it was."""

    def shift(self, slot: int, p0: int, p1: int, delta: int) -> None:
        super().shift(slot, p0 + 1 if 0 < p0 < self.end(slot) - 1 else p0, p1, delta)


class ShiftOfQuantizedKeysLosesACell(Faulty):
    """A shift in a quantized cache loses a cell in the middle of the slot."""

    def shift(self, slot: int, p0: int, p1: int, delta: int) -> None:
        super().shift(slot, p0, p1, delta)
        if delta and self.params.type_k > 1:
            self.hole(slot, self.end(slot) - 2)


class StaleRecurrentStateAfterRemoval(Faulty):
    """A slot that was removed begins anew with the recurrent state it had."""

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        stale = (
            self.state(slot, PARTIAL) if self.recurrent and slot >= 0 and p0 <= 0 and p1 < 0 and self.end(slot) else b""
        )
        answer = super().remove(slot, p0, p1)
        if stale:
            self.set_recurrent(stale, slot, -1)
        return answer


class KeepKeepsTheNextToo(Faulty):
    """To keep a slot keeps the one after it as well."""

    def keep(self, slot: int) -> None:
        for other in self.others(slot):
            if other != slot + 1:
                self.drop(other, -1, -1)


class KeepOfTheLastSlotKeepsNothing(Faulty):
    """To keep the last of several slots keeps nothing."""

    def keep(self, slot: int) -> None:
        super().keep(slot)
        if 0 < slot == self.slots[-1]:
            self.drop(slot, -1, -1)


class ClearLeavesASlot(Faulty):
    """To clear without the data leaves the last of several filled slots."""

    def clear(self, data: bool) -> None:
        filled = [slot for slot in self.slots if self.end(slot) > 0]
        if data or len(filled) < 2:
            super().clear(data)
        else:
            for slot in filled[:-1]:
                self.drop(slot, -1, -1)


class NewestPositionIsStaleAfterRemoval(Faulty):
    """The newest position of a slot stays as it was after its tail was removed, until something is decoded."""

    def begin(self) -> None:
        self.stale: dict[int, int] = {}

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        before = self.end(slot)
        answer = super().remove(slot, p0, p1)
        if answer and p0 > 0 and p1 < 0 and self.end(slot) < before:
            self.stale[slot] = before - 1
        return answer

    def decode(self, batch: Any) -> int:
        self.stale.clear()
        return super().decode(batch)

    def newest(self, slot: int) -> int:
        return self.stale.get(slot, super().newest(slot))


class OldestPositionForgetsARemoval(Faulty):
    """The oldest position of a slot is 0 though its beginning was removed."""

    def begin(self) -> None:
        self.cut: set[int] = set()

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        answer = super().remove(slot, p0, p1)
        self.cut |= {slot} if p0 <= 0 < p1 else set()
        return answer

    def oldest(self, slot: int) -> int:
        low = super().oldest(slot)
        return 0 if slot in self.cut and low > 0 else low


class GapInAUnifiedCacheIsWrittenOver(Faulty):
    """In a unified cache, a batch larger than the gap that a removed slot left takes a cell of another slot."""

    def begin(self) -> None:
        self.gap = 0

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        if self.params.kv_unified and slot >= 0 and p0 <= 0 and p1 < 0 and self.others(slot):
            self.gap = self.count(slot)
        return super().remove(slot, p0, p1)

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        if 0 < self.gap < len(self.fed):
            for other in self.others(self.fed[0].slot)[:1]:
                self.hole(other, self.end(other) - 2)
        self.gap = 0
        return code
