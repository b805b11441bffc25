"""Faults of decoding: which cells, which rows, which answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.mutants.layer import Faulty


class RowsOfSlotsOutOfOrderAreSwapped(Faulty):
    """In a batch whose slots are not in order, the first and the last row of logits are swapped."""

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        slots = [fed.slot for fed in self.fed]
        rows = [index for index, fed in enumerate(self.fed) if fed.output]
        self.swapped = {rows[0]: rows[-1], rows[-1]: rows[0]} if rows and slots != sorted(slots) else {}
        return code

    def logits(self, index: int) -> Any:
        return super().logits(self.swapped.get(index, index))


class LastUbatchOfOneIsStale(Faulty):
    """When the last ubatch has one token, its row of logits is the last one of the decode before."""

    def begin(self) -> None:
        self.before: np.ndarray[Any, Any] | None = None

    def decode(self, batch: Any) -> int:
        rows = [index for index, fed in enumerate(self.fed) if fed.output]
        code = super().decode(batch)
        self.stale = None
        row = self.row(rows[-1]) if rows and code == 0 else None
        if (
            len(self.fed) > self.params.n_ubatch
            and len(self.fed) % self.params.n_ubatch == 1
            and self.before is not None
        ):
            self.stale = self.before
        if row is not None:
            self.before = row.copy()
        return code

    def logits(self, index: int) -> Any:
        last = index == len(self.fed) - 1 and self.stale is not None
        return self.given(self.stale) if last and self.stale is not None else super().logits(index)


class WholeUbatchIsNotANumber(Faulty):
    """The last row of a batch of one slot that fills one ubatch exactly is NaN."""

    def logits(self, index: int) -> Any:
        whole = len(self.fed) == self.params.n_ubatch and len({fed.slot for fed in self.fed}) == 1
        if whole and index == len(self.fed) - 1:
            return self.given(np.full(self.vocabulary, np.nan))
        return super().logits(index)


class FullCacheHasNoRoom(Faulty):
    """A decode that fills the last cell finds no room."""

    def decode(self, batch: Any) -> int:
        held = [self.count(slot) + sum(fed.slot == slot for fed in self.fed) for slot in self.slots]
        most = sum(held) if self.params.kv_unified else max(held)
        return 1 if most == self.room() and not self.recurrent else super().decode(batch)


class CacheThatWrapsFails(Faulty):
    """A decode fails once more cells were used than there are, so that some are used again."""

    def begin(self) -> None:
        self.used: dict[int, int] = {}

    def decode(self, batch: Any) -> int:
        for fed in self.fed:
            stream = 0 if self.params.kv_unified else fed.slot
            self.used[stream] = self.used.get(stream, 0) + 1
        wraps = max(self.used.values(), default=0) > self.room() and not self.recurrent
        code = super().decode(batch)
        return -3 if wraps and code == 0 else code


class ThreeSlotsMoveAPosition(Faulty):
    """In a batch of three slots or more the newest cell of one stands one position further."""

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        slots = sorted({fed.slot for fed in self.fed})
        if code == 0 and len(slots) > 2:
            end = self.end(slots[2])
            self.move(slots[2], end - 1, end)
        return code


class EqualTokensShareARow(Faulty):
    """Two slots that decode the same token at the same position in one batch get the same logits."""

    def logits(self, index: int) -> Any:
        own = self.fed[index]
        alike = (
            place
            for place, fed in enumerate(self.fed[:index])
            if fed.output and (fed.token, fed.position) == (own.token, own.position) and fed.slot != own.slot
        )
        return super().logits(next(alike, index))


class ManyOutputsAreOneOff(Faulty):
    """In a batch with more than eight outputs the last row is that of the output before."""

    def logits(self, index: int) -> Any:
        rows = [place for place, fed in enumerate(self.fed) if fed.output]
        return super().logits(rows[-2] if len(rows) > 8 and index == rows[-1] else index)


class SingleTokenBesideALongPromptIsSwapped(Faulty):
    """A slot's single token beside a prompt that needs several ubatches gets the logits of another row."""

    def logits(self, index: int) -> Any:
        rows = [place for place, fed in enumerate(self.fed) if fed.output]
        alone = sum(fed.slot == self.fed[index].slot for fed in self.fed) == 1
        if alone and len(self.fed) > self.params.n_ubatch and len(rows) > 1:
            return super().logits(rows[0] if rows[0] != index else rows[1])
        return super().logits(index)


class WindowLosesACell(Faulty):
    """With a sliding window, a decode that goes beyond it loses a cell that is still in reach."""

    def begin(self) -> None:
        self.lost: set[int] = set()

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        for slot in {fed.slot for fed in self.fed} - self.lost if self.window and code == 0 else ():
            if self.end(slot) > self.window:
                self.lost.add(slot)
                self.hole(slot, self.end(slot) - 5)
        return code


class SecondSlotOfALargeBatchIsCut(Faulty):
    """A batch of two slots whose first has more tokens than an ubatch holds loses a cell of the second."""

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        slots = list(dict.fromkeys(fed.slot for fed in self.fed))
        first = sum(fed.slot == self.fed[0].slot for fed in self.fed)
        if code == 0 and len(slots) == 2 and first > self.params.n_ubatch:
            self.hole(slots[1], self.end(slots[1]) - 2)
        return code


class AnswerAfterALongPromptIsAnothers(Faulty):
    """After a prompt of two ubatches, a slot of a recurrent model answers with the logits of another slot of the batch."""

    def begin(self) -> None:
        self.long: set[int] = set()

    def decode(self, batch: Any) -> int:
        code = super().decode(batch)
        self.answers = self.long & {fed.slot for fed in self.fed}
        counts = [fed.slot for fed in self.fed]
        self.long = {slot for slot in counts if self.recurrent and counts.count(slot) > self.params.n_ubatch}
        return code

    def logits(self, index: int) -> Any:
        own = self.fed[index].slot
        other = next((place for place, fed in enumerate(self.fed) if fed.output and fed.slot != own), index)
        return super().logits(other if own in self.answers else index)
