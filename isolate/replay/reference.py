"""The slots as plain token lists: what a right library would hold after each step.

A slot is an immutable record that a step replaces, so a saved state is simply the slot as it was. Memory has one or two
halves: attention keeps a cell a token; a sliding window keeps the newest tokens again, for layers of its own; recurrent
layers keep one state that has seen some tokens. The second half cannot be rolled back, which is why servers take
checkpoints of it. A partial restore sets it alone, and while the halves disagree a slot has no right logits.

A slot is plain while it is what decoding its tokens, at their positions, into an empty slot would give. A removal or a shift
in the middle ends that; from then on the slot keeps its own history, which can be replayed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import msgspec

from isolate.case import (
    Checkpoint,
    Clear,
    Decode,
    Load,
    Reopen,
    Restore,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)
from isolate.replay.batch import Fed
from isolate.replay.engine import Result

Kind = Literal["none", "attention", "window", "recurrent", "hybrid"]
Item = TypeVar("Item")

#: Beyond every position: what -1 means as the end of a range.
END = 2**31 - 1


class Decoded(NamedTuple):
    """Tokens that were decoded, and where."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class Removed(NamedTuple):
    """Positions p0 to p1 (not included) were removed."""

    p0: int
    p1: int


class Moved(NamedTuple):
    """Positions p0 to p1 (not included) moved by delta."""

    p0: int
    p1: int
    delta: int


Act = Decoded | Removed | Moved


@dataclass(frozen=True)
class Recurrent:
    """What recurrent layers hold: a state that has seen these tokens and stands at this position."""

    tokens: tuple[int, ...] = ()
    position: int = -1


@dataclass(frozen=True)
class Window:
    """What layers with a sliding window hold: a cell a token, of which old ones may have been given up."""

    tokens: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    #: for each cell: whether it must still be there
    certain: tuple[bool, ...] = ()
    #: cells that the next token reaches have been given up
    lost: bool = False


@dataclass(frozen=True)
class Slot:
    """One slot: a token and a position for each cell, and what its second half holds."""

    tokens: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    recurrent: Recurrent = Recurrent()
    window: Window = Window()
    #: it was moved as a whole, so its keys were turned twice
    moved: bool = False
    #: how it came about, once it is no plain token list
    history: tuple[Act, ...] | None = None
    #: why nothing can be said about its logits, "" where something can
    doubt: str = ""
    #: nothing is known of its positions either
    unknown: bool = False

    def acts(self) -> tuple[Act, ...]:
        """What to do to an empty slot to get this one."""
        if self.history is not None:
            return self.history
        return (Decoded(self.tokens, self.positions),) if self.tokens else ()


@dataclass(frozen=True)
class Held:
    """What a slot's oldest position can be, and its newest, each in order."""

    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    #: or it may hold nothing
    or_none: bool = False

    def allows(self, low: int, high: int) -> bool:
        """These can be the oldest and the newest."""
        return (self.or_none and low == high == -1) or (low in self.oldest and high in self.newest)

    def __str__(self) -> str:
        if self.or_none:
            return "positions that it holds, or -1"
        oldest = f"{self.oldest[0]}" + (f" to {self.oldest[-1]}" if len(self.oldest) > 1 else "")
        return f"{oldest} and {self.newest[0]}"


class Reference:
    """All slots of a context, and the states that were taken of them.

    `reach` is the model's n_swa. `relative`: the model knows only distances of positions, so that moving a whole slot changes
    its logits by rounding only.
    """

    def __init__(self, kind: Kind, reach: int = 0, relative: bool = True) -> None:
        self.kind = kind
        self.reach = reach
        self.relative = relative
        self.slots: dict[int, Slot] = {}
        self.taken: dict[str, tuple[Slot, frozenset[str]]] = {}

    def empty(self) -> Reference:
        """One for the same memory, before the first step."""
        return Reference(self.kind, self.reach, self.relative)

    def slot(self, number: int) -> Slot:
        """The slot as it should be; an empty one where nothing was done."""
        return self.slots.get(number, Slot())

    def after(self, step: Step, result: Result) -> None:
        """Follow a step that gave this result."""
        match step:
            case Decode():
                self._decoded(result)
            case Checkpoint():
                self.taken[step.name] = (self.slot(step.slot), frozenset(step.flags))
            case Save():
                self.taken[step.name] = (self.slot(step.slot), frozenset())
            case Restore() | Load():
                assert result.slot is not None
                self.slots[result.slot] = self._set(self.slot(result.slot), step, result)
            case SeqRm():
                for number in (list(self.slots) if step.slot == -1 else [step.slot]) if result.code else []:
                    self.slots[number] = self._remove(self.slot(number), *_range(step.p0, step.p1))
            case SeqCp():
                self.slots[step.into] = self._copy(step)
            case SeqAdd():
                self.slots[step.slot] = self._move(self.slot(step.slot), *_range(step.p0, step.p1), step.delta)
            case SeqKeep():
                self.slots = {step.slot: self.slot(step.slot)}
            case Clear() | Reopen():
                self.slots.clear()

    def held(self, number: int) -> Held | None:
        """Where a slot's oldest and newest position can be; None where nothing is known of them."""
        slot = self.slot(number)
        if slot.unknown:
            return None
        if self.kind == "window":
            return _held_by_window(slot.window)
        oldest, newest = min(slot.positions, default=-1), max(slot.positions, default=-1)
        if self.kind == "recurrent":
            oldest = newest = slot.recurrent.position
        elif self.kind == "hybrid":
            # as llama.cpp joins its halves
            oldest, newest = max(oldest, slot.recurrent.position), min(newest, slot.recurrent.position)
        return Held((oldest,), (newest,))

    def observe(self, number: int, oldest: int) -> None:
        """Tell it a slot's oldest position after a step that may have taken away what its window had kept.

        Where a cell that the next token reaches may have been given up, it must be `oldest` or newer: else the slot is lost.
        """
        slot = self.slot(number)
        window = slot.window
        if self.kind != "window" or not window.positions:
            return
        first = max(window.positions) + 1 - self.reach + 1
        needed = [(at, sure) for at, sure in zip(window.positions, window.certain, strict=True) if at >= first]
        if not all(sure for _, sure in needed) and not 0 <= oldest <= min(at for at, _ in needed):
            self.slots[number] = replace(slot, window=replace(window, lost=True))

    # -- decode

    def _decoded(self, result: Result) -> None:
        if result.code in (1, -1):
            # No room, or a batch that was refused: the memory is as it was (llama.h).
            return
        for fed in result.fed:
            slot = self._feed(self.slot(fed.slot), fed)
            if result.code != 0:
                slot = replace(slot, unknown=True, doubt="a decode failed in the middle")
            self.slots[fed.slot] = slot

    def _feed(self, slot: Slot, fed: Fed) -> Slot:
        run = Decoded(tuple(fed.tokens.tolist()), tuple(range(fed.start, fed.start + len(fed.tokens))))
        history = None if slot.history is None else _extended(slot.history, run)
        window, recurrent = slot.window, slot.recurrent
        if self.kind == "window":
            positions = window.positions + run.positions
            certain = self._in_reach(positions, window.certain + (True,) * len(run.tokens))
            window = replace(window, tokens=window.tokens + run.tokens, positions=positions, certain=certain)
        if self.kind in ("recurrent", "hybrid"):
            recurrent = Recurrent(recurrent.tokens + run.tokens, run.positions[-1])
        return replace(
            slot,
            tokens=slot.tokens + run.tokens,
            positions=slot.positions + run.positions,
            window=window,
            recurrent=recurrent,
            history=history,
            doubt=slot.doubt or self._doubt(slot, fed.start),
        )

    def _doubt(self, slot: Slot, start: int) -> str:
        """Why tokens decoded into the slot from `start` have no right logits; "" where they have."""
        if slot.positions and start <= max(slot.positions):
            return "it holds cells at positions that were decoded again"
        if slot.positions and start > max(slot.positions) + 1:
            return "its positions have a gap"
        if self.kind == "window" and slot.window.lost:
            return "its window no longer holds all that the next token reaches"
        if self.kind == "window" and (slot.window.tokens, slot.window.positions) != (slot.tokens, slot.positions):
            return "its window holds other tokens than its other layers"
        if self.kind == "hybrid" and slot.history is None and slot.recurrent.tokens != slot.tokens:
            return "its recurrent state has seen other tokens than its attention holds"
        return ""

    def _in_reach(self, positions: tuple[int, ...], certain: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which cells must still be there. All that is promised is n_swa - 1 positions up to the newest, also by swa_full."""
        floor = max(positions, default=0) - self.reach + 2
        return tuple([sure and position >= floor for sure, position in zip(certain, positions, strict=True)])

    # -- states

    def _set(self, slot: Slot, step: Restore | Load, result: Result) -> Slot:
        if not result.code:
            return Slot(unknown=True, doubt="a state was refused")
        if not isinstance(step.damage, msgspec.UnsetType):
            return Slot(unknown=True, doubt="its state was changed on purpose")
        saved, flags = self.taken[step.name]
        if isinstance(step, Restore) and not isinstance(step.flags, msgspec.UnsetType) and set(step.flags) != flags:
            return Slot(unknown=True, doubt="its state was taken with other flags")
        # only cells in reach are in a state
        window = replace(saved.window, certain=self._in_reach(saved.window.positions, saved.window.certain))
        if "partial_only" not in flags or self.kind not in ("window", "hybrid"):
            return replace(saved, window=window)
        doubt = slot.doubt or saved.doubt
        if slot.history is not None or saved.history is not None:
            doubt = doubt or "a part of its state was set while it was no plain token list"
        return replace(slot, recurrent=saved.recurrent, window=window, doubt=doubt)

    # -- memory

    def _remove(self, slot: Slot, p0: int, p1: int) -> Slot:
        if (p0, p1) == (0, END):
            return Slot()
        recurrent = _rolled_back(slot.recurrent, p0, p1)
        if self.kind == "recurrent":
            count = len(recurrent.tokens)
            return _kept(replace(slot, tokens=recurrent.tokens, positions=slot.positions[:count], recurrent=recurrent))
        stays = [not p0 <= position < p1 for position in slot.positions]
        in_window = [not p0 <= position < p1 for position in slot.window.positions]
        window = replace(
            slot.window,
            tokens=_chosen(slot.window.tokens, in_window),
            positions=_chosen(slot.window.positions, in_window),
            certain=_chosen(slot.window.certain, in_window),
        )
        history = slot.history
        if history is not None or sorted(stays, reverse=True) != stays:
            history = (*slot.acts(), Removed(p0, p1))
        positions = _chosen(slot.positions, stays)
        tokens = _chosen(slot.tokens, stays)
        return _kept(
            replace(slot, tokens=tokens, positions=positions, recurrent=recurrent, window=window, history=history)
        )

    def _move(self, slot: Slot, p0: int, p1: int, delta: int) -> Slot:
        recurrent = slot.recurrent
        if p0 <= recurrent.position < p1:
            recurrent = replace(recurrent, position=recurrent.position + delta)
        moves = [p0 <= position < p1 for position in slot.positions]
        if delta == 0 or not any(moves):
            return replace(slot, recurrent=recurrent)
        positions = _moved(slot.positions, p0, p1, delta)
        if self.kind == "recurrent":
            doubt = slot.doubt or ("" if all(moves) else "a part of its tokens was moved")
            return replace(slot, positions=positions, recurrent=recurrent, doubt=doubt, unknown=min(positions) < 0)
        window = replace(slot.window, positions=_moved(slot.window.positions, p0, p1, delta))
        history, doubt, unknown = slot.history, slot.doubt, slot.unknown
        if history is not None or not all(moves) or not self.relative:
            history = (*slot.acts(), Moved(p0, p1, delta))
        if len(set(positions)) < len(positions):
            doubt = doubt or "two of its cells were moved to one position"
        if min(positions) < 0:
            doubt, unknown = doubt or "cells were moved below position 0", True
        return replace(
            slot,
            positions=positions,
            recurrent=recurrent,
            window=window,
            moved=True,
            history=history,
            doubt=doubt,
            unknown=unknown,
        )

    def _copy(self, step: SeqCp) -> Slot:
        source, target = self.slot(step.slot), self.slot(step.into)
        if step.slot == step.into:
            return target
        if target != Slot():
            return replace(source, unknown=True, doubt="a slot was copied into one that was not empty")
        p0, p1 = _range(step.p0, step.p1)
        copy = source if p1 == END else self._remove(source, p1, END)
        return copy if p0 == 0 else self._remove(copy, 0, p0)


def _held_by_window(window: Window) -> Held:
    held = tuple(sorted(window.positions))
    certain = [position for position, sure in zip(window.positions, window.certain, strict=True) if sure]
    if certain:
        oldest = min(certain)
        return Held(tuple([position for position in held if position <= oldest]), (max(certain),))
    return Held(held, held, or_none=True) if held else Held((-1,), (-1,))


def _range(p0: int, p1: int) -> tuple[int, int]:
    """Positions as llama.h reads them: below 0 is the beginning, or the end."""
    return max(p0, 0), END if p1 < 0 else p1


def _extended(history: tuple[Act, ...], run: Decoded) -> tuple[Act, ...]:
    last = history[-1]
    if isinstance(last, Decoded):
        return (*history[:-1], Decoded(last.tokens + run.tokens, last.positions + run.positions))
    return (*history, run)


def _rolled_back(recurrent: Recurrent, p0: int, p1: int) -> Recurrent:
    """The state after a removal that the library agreed to: as it was, gone, or back by a snapshot."""
    if not p0 <= recurrent.position < p1:
        return recurrent
    seen = len(recurrent.tokens) - (recurrent.position - p0 + 1)
    return Recurrent(recurrent.tokens[:seen], p0 - 1) if p0 > 0 and seen > 0 else Recurrent()


def _chosen(items: Sequence[Item], chosen: Sequence[bool]) -> tuple[Item, ...]:
    return tuple(item for item, choose in zip(items, chosen, strict=True) if choose)


def _moved(positions: Sequence[int], p0: int, p1: int, delta: int) -> tuple[int, ...]:
    return tuple(position + delta if p0 <= position < p1 else position for position in positions)


def _kept(slot: Slot) -> Slot:
    """The slot, or a new one where it holds nothing any more."""
    holds = slot.positions or slot.window.positions or slot.recurrent.position >= 0
    return slot if holds or slot.unknown else Slot()
