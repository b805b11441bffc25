"""Cases that step over documented limits: a clean error is the only right answer, and nothing else may change by it.

Among steps that are right stand some that no server should make: slots, tokens and positions that are not there, batches that
are too large, states that are cut or were damaged. What the library answers to one of those is accepted, whatever it is; an
abort is not, nor that another slot suffers. Slots that such a step touched are emptied before they are used again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec import UNSET
from msgspec.structs import replace

from isolate.case import (
    Case,
    Checkpoint,
    Context,
    Damage,
    Decode,
    Load,
    Pattern,
    Restore,
    Run,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)
from isolate.fault import Fault
from isolate.recipes import VOCABULARY, Recipe
from isolate.replay.reference import Slot
from isolate.search.generate import Generator

#: How many of the steps overstep a limit.
SHARE = 0.2
#: Answers that say no.
CLEAN = ("decode", "state", "memory")


class Hostile(Generator):
    """A generator that oversteps limits now and then."""

    def __init__(self, chance: Random, recipe: Recipe, context: Context, on_device: bool = False) -> None:
        super().__init__(chance, recipe, context, on_device)
        #: numbers of the steps that overstep a limit
        self.wild: set[int] = set()

    def grow(self, count: int) -> None:
        """Add about this many steps, some of them wrong."""
        wanted = len(self.steps) + count
        while len(self.steps) < wanted:
            if self.steps and self.chance.random() < SHARE:
                self.chance.choice(self._wild_actions())()
            else:
                super().grow(1)

    def _wild_actions(self) -> tuple[Callable[[], None], ...]:
        return (
            self.decode_wrong_slot, self.decode_wrong_token, self.decode_wrong_position, self.decode_too_many,
            self.decode_nothing, self.set_damaged, self.set_into_wrong_slot, self.take_wrong_slot, self.remove_wrong,
            self.copy_wrong, self.shift_wrong, self.keep_wrong,
        )  # fmt: skip

    def _wrong_slot(self) -> int:
        top = self.context.n_seq_max
        return self.chance.choice((top, top, top + 3, -1, -2, 255, 256, 2**31 - 1, -(2**31)))

    def _wild(self, step: Step, *touched: int) -> None:
        """Append a step whose answer is not known; the slots it may have changed are not known after it."""
        self.wild.add(len(self.steps))
        self.steps.append(step)
        for slot in touched or self.slots:
            self.reference.slots[slot] = Slot(
                unknown=True, doubt="a step of the case asked for what may not be asked for"
            )

    def _some_run(self, slot: int, count: int = 3) -> Run:
        return Run(slot, Pattern(count, 120, self.chance.randrange(120), 7))

    def decode_wrong_slot(self) -> None:
        """Tokens for a slot that is not there, alone or beside right ones."""
        slot = self._slot()
        batch = [self._some_run(self._wrong_slot())]
        if self.chance.random() < 0.5:
            batch.append(self._some_run(slot))
        self._wild(Decode(batch=batch), slot)

    def decode_wrong_token(self) -> None:
        """Tokens that the vocabulary has not."""
        slot = self._slot()
        self._wild(Decode(batch=[Run(slot, [1, self.chance.choice((VOCABULARY, 2**31 - 1)), 2])]), slot)

    def decode_wrong_position(self) -> None:
        """Positions that were decoded before, or leave a gap."""
        slot = self._slot()
        end = self.ends.get(slot, 0)
        at = self.chance.choice((0, max(0, end - 2), end + 1, end + 300, 1_000_000))
        self._wild(Decode(batch=[replace(self._some_run(slot), at=at)]), slot)

    def decode_too_many(self) -> None:
        """More tokens than a batch may have."""
        slot = self._slot()
        self._wild(Decode(batch=[self._some_run(slot, self.context.n_batch + self.chance.choice((1, 7)))]), slot)

    def decode_nothing(self) -> None:
        """A batch without tokens."""
        self._wild(Decode(batch=[]), self._slot())

    def set_damaged(self) -> None:
        """A state that was cut, or has a wrong byte."""
        if not self.states:
            return self.take_checkpoint()
        state = self.chance.choice(list(self.states.values()))
        if self.chance.random() < 0.4:
            damage = Damage(cut=self.chance.choice((0, 1, 3, 4, 7, 11, 60, 500)))
        else:
            damage = Damage(
                byte=self.chance.choice((0, 3, 4, 7, 8, 12, 13, 20, 40, 100)), xor=self.chance.choice((1, 128, 255))
            )
        kind = Load if state.saved else Restore
        self._wild(kind(name=state.name, damage=damage), state.slot)
        return None

    def set_into_wrong_slot(self) -> None:
        """A state for a slot that is not there."""
        if not self.states:
            return self.save()
        state = self.chance.choice(list(self.states.values()))
        kind = Load if state.saved else Restore
        self._wild(kind(name=state.name, slot=self._wrong_slot()), state.slot)
        return None

    def take_wrong_slot(self) -> None:
        """The state of a slot that is not there."""
        self._wild(Checkpoint(slot=self._wrong_slot(), name=self._name()), self._slot())

    def remove_wrong(self) -> None:
        """A slot that is not there, or a range that ends before it begins."""
        slot = self._slot()
        end = self.ends.get(slot, 0)
        wrong = (
            SeqRm(slot=self._wrong_slot(), p0=0) if self.chance.random() < 0.5 else SeqRm(slot=slot, p0=end + 5, p1=1)
        )
        self._wild(wrong)

    def copy_wrong(self) -> None:
        """Into itself, into a slot that holds something, from or into one that is not there."""
        slot, other = self._slot(), self._slot()
        wrong = self._wrong_slot()
        self._wild(
            self.chance.choice(
                (
                    SeqCp(slot=slot, into=slot),
                    SeqCp(slot=slot, into=other),
                    SeqCp(slot=wrong, into=slot),
                    SeqCp(slot=slot, into=wrong),
                )
            )
        )

    def shift_wrong(self) -> None:
        """A slot that is not there, or below position 0."""
        slot = self._slot()
        self._wild(
            self.chance.choice(
                (
                    SeqAdd(slot=self._wrong_slot(), delta=1),
                    SeqAdd(slot=slot, delta=-self.ends.get(slot, 0) - 3),
                    SeqAdd(slot=slot, delta=-1, p0=0, p1=1),
                )
            )
        )

    def keep_wrong(self) -> None:
        """Only a slot that is not there."""
        self._wild(SeqKeep(slot=self._wrong_slot()))


def accepted(case: Case, fault: Fault, wild: frozenset[int]) -> Case | None:
    """The case with the answer it got taken as right, where a step was refused; else None.

    After the first step that oversteps a limit nobody knows what the cache holds, so that a right one may be refused, too.
    """
    index = fault.step.index
    if index is None or index < min(wild, default=index + 1) or fault.kind not in CLEAN or fault.origin.code is None:
        return None
    step = case.steps[index]
    if step.returns is not UNSET:
        return None
    steps = list(case.steps)
    steps[index] = replace(step, returns=bool(fault.origin.code) if fault.kind == "memory" else fault.origin.code)
    return replace(case, steps=steps)
