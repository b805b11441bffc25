"""Cases by chance: steps that a server could make, in orders that it seldom makes.

The generator knows what each slot holds by the same reference that judges a run, and asks of a slot only what its memory
can do and llama.h allows. It leans towards what breaks servers: small last batches beside other slots' single tokens,
restores in the middle of another slot's prompt, states set into other slots, full and fragmented caches, the edges of
ubatches and of the sliding window. The same source of chance gives the same case.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from isolate.case import (
    Checkpoint,
    Clear,
    Context,
    Decode,
    Flag,
    Load,
    Pattern,
    Reopen,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
)
from isolate.recipes import Recipe
from isolate.replay.reference import Slot
from isolate.search.followed import Followed

#: Token i of script c is (7 i + 13 c) mod 120. Slots on one script have equal prompts, and reference logits are found again.
MODULO, STRIDE, APART, SCRIPTS = 120, 7, 13, 6
Item = TypeVar("Item")


def weighted(chance: Random, choices: Sequence[tuple[Item, float]]) -> Item:
    """One of the choices, each as often as the number beside it says; also where Hypothesis's `Random` passes over weights."""
    ends = list(accumulate(weight for _, weight in choices))
    return choices[bisect(ends, chance.random() * ends[-1], 0, len(ends) - 1)][0]


class Generator(Followed):
    """Chooses the next steps of a case by what its slots hold."""

    def __init__(self, chance: Random, recipe: Recipe, context: Context, on_device: bool = False) -> None:
        super().__init__(recipe, context)
        self.chance = chance
        self.on_device = on_device
        self.scripts: dict[int, int] = {}
        self.named = 0

    def grow(self, count: int) -> None:
        """Add about this many steps."""
        wanted = len(self.steps) + count
        actions = self._actions()
        while len(self.steps) < wanted:
            weighted(self.chance, actions)()

    def _actions(self) -> Sequence[tuple[Callable[[], None], float]]:
        """What can be done, and how often."""
        recipe = self.recipe
        second_half = recipe.memory in ("recurrent", "hybrid", "window")
        return (
            (self.decode_one_prompt, 8),
            (self.decode_mixed, 12),
            (self.decode_singles, 8),
            (self.decode_last_part, 5),
            (self.fill, 1.5),
            (self.take_checkpoint, 8 if second_half else 3),
            (self.go_back, 9 if second_half else 3),
            (self.save, 5),
            (self.load, 7),
            (self.remove_tail, 5),
            (self.remove_middle, 0.7 if recipe.partial_removal else 0),
            (self.take_back, 6 if self.context.n_rs_seq is not UNSET else 0),
            (self.remove_nothing, 2),
            (self.remove_slot, 4),
            (self.remove_every_slot, 0.1),
            (self.shift_context, 4),
            (self.shift_slot, 2),
            (self.copy_slot, 5),
            # Known to fail between streams, at the cost of a child.
            (self.copy_part, 0.7 if self.context.kv_unified else 0.1),
            (self.keep_one, 0.3 if self.context.kv_unified else 0.1),
            (self.clear, 0.7),
            (self.reopen, 0.4),
        )

    def _slot(self) -> int:
        return self.chance.choice(self.slots)

    def length(self) -> int:
        """A number of tokens, often at the edge of an ubatch, often small."""
        ubatch = self.context.n_ubatch
        kind = self.chance.random()
        if kind < 0.35:
            return self.chance.randint(1, 8)
        if kind < 0.6:
            return max(1, ubatch * self.chance.randint(1, 2) + self.chance.randint(-1, 1))
        if kind < 0.75:
            return ubatch * self.chance.randint(0, 2) + self.chance.randint(4, 8)
        if self.recipe.window and kind < 0.85:
            return max(1, self.recipe.window + self.chance.randint(-2, 2))
        return self.chance.randint(2, 70)

    def _run(self, slot: int, count: int) -> Run:
        """The next tokens of a slot's script."""
        at = len(self.held(slot).tokens)
        if slot not in self.scripts or at == 0:
            self.scripts[slot] = self.chance.randrange(SCRIPTS)
        first = (STRIDE * at + APART * self.scripts[slot]) % MODULO
        logits = weighted(self.chance, (("last", 8), ("all", 2), ("none", 1)))
        return Run(slot, Pattern(count, MODULO, first, STRIDE), logits)  # type: ignore[arg-type]

    def _decode(self, wanted: dict[int, int]) -> None:
        """Decode so many tokens of these slots, as far as there is room for them; slots nothing is known of are emptied."""
        runs: list[Run] = []
        left = self.context.n_batch
        taken = 0
        for slot, count in wanted.items():
            held = self.held(slot)
            if held.unknown or (held.doubt and self.chance.random() < 0.8):
                self.add(SeqRm(slot=slot))
            room = self.room(slot) - (taken if self.context.kv_unified else 0)
            count = min(count, left, room)
            if count > 0:
                runs.append(self._run(slot, count))
                left -= count
                taken += count
        if runs:
            self.add(Decode(batch=runs))
        else:
            self.add(SeqRm(slot=self._slot()))

    def decode_one_prompt(self) -> None:
        """A part of one slot's prompt."""
        self._decode({self._slot(): self.length()})

    def decode_mixed(self) -> None:
        """A part of one slot's prompt beside single tokens of others, in any order."""
        slots = self.chance.sample(self.slots, self.chance.randint(1, len(self.slots)))
        wanted = dict.fromkeys(slots, 1)
        for slot in slots[: 1 + (self.chance.random() < 0.3)]:
            wanted[slot] = self.length()
        order = self.chance.sample(list(wanted), len(wanted))
        self._decode({slot: wanted[slot] for slot in order})
        last = self.steps[-1]
        if isinstance(last, Decode) and len(last.batch) > 1 and self.chance.random() < 0.1:
            self._divide(last)

    def _divide(self, decode: Decode) -> None:
        """The longest run of a batch in two parts, with the others between them."""
        longest = max(decode.batch, key=lambda run: run.count())
        if longest.count() < 2 or not isinstance(longest.tokens, Pattern):
            return
        cut = self.chance.randint(1, longest.count() - 1)
        first, count = longest.tokens.first, longest.tokens.count
        begins = replace(longest.tokens, count=cut)
        goes_on = replace(longest.tokens, count=count - cut, first=(first + STRIDE * cut) % MODULO)
        others = [run for run in decode.batch if run is not longest]
        batch = [replace(longest, tokens=begins, logits="none"), *others, replace(longest, tokens=goes_on)]
        self.steps[-1] = replace(decode, batch=batch)

    def decode_singles(self) -> None:
        """One token of each of several slots."""
        slots = self.chance.sample(self.slots, self.chance.randint(1, len(self.slots)))
        self._decode(dict.fromkeys(sorted(slots), 1))

    def decode_last_part(self) -> None:
        """What is left of several prompts after a checkpoint was taken: some tokens of each."""
        count = self.chance.choice((1, 2, 3, 4, 4, 5))
        self._decode({slot: count for slot in self.slots if self.chance.random() < 0.8})

    def fill(self) -> None:
        """Fill a slot up to the last cell or nearly, sometimes beyond, where the call must be refused and change nothing."""
        slot = self._slot()
        room = self.room(slot)
        ask = room - self.chance.choice((0, 0, 1, 2))
        while ask > 0 and room > 0:
            self._decode({slot: min(ask, self.context.n_batch)})
            ask, before = ask - min(ask, self.context.n_batch), room
            room = self.room(slot)
            if room >= before:
                return
        if self.recipe.memory == "attention" and not self.shared and self.chance.random() < 0.5:
            over = room + self.chance.randint(1, 3)
            if over <= self.context.n_batch and self._may_be_refused():
                self.add(Decode(batch=[self._run(slot, over)], returns=1))

    def _may_be_refused(self) -> bool:
        """Every cell is where it seems to be, so that no room is no room."""
        return not any(self.held(slot).unknown or self.held(slot).doubt for slot in self.slots)

    # -- states

    def _name(self) -> str:
        self.named += 1
        return f"s{self.named}"

    def take_checkpoint(self) -> None:
        """A context checkpoint of a slot, as a server takes it before the end of a prompt."""
        used = self.used()
        if not used:
            return self.decode_one_prompt()
        flags: list[Flag] = ["partial_only"]
        if self.on_device and self.chance.random() < 0.15:
            flags.append("on_device")
        self.add(Checkpoint(slot=self.chance.choice(used), name=self._name(), flags=flags))

    def go_back(self) -> None:
        """Set a checkpoint back and remove what came after it; then often a prompt that goes another way."""
        candidates = [(slot, state) for slot in self.slots for state in self.usable(slot)]
        if not candidates:
            return self.take_checkpoint()
        slot, state = self.chance.choice(candidates)
        self.add(Restore(name=state.name))
        if state.partial or self.chance.random() < 0.5:
            self.add(SeqRm(slot=slot, p0=state.end))
        if self.chance.random() < 0.5:
            self.scripts[slot] = self.chance.randrange(SCRIPTS)

    def save(self) -> None:
        """The whole state of a slot, to memory or to a file."""
        used = self.used()
        if not used:
            return self.decode_one_prompt()
        via = "file" if self.chance.random() < 0.2 else "memory"
        self.add(Save(slot=self.chance.choice(used), name=self._name(), via=via))  # type: ignore[arg-type]

    def load(self) -> None:
        """A whole state into any slot that has room for it."""
        saved = [state for state in self.states.values() if state.saved and not state.held.unknown]
        if not saved:
            return self.save()
        state = self.chance.choice(saved[-4:])
        slot = state.slot if self.chance.random() < 0.4 else self._slot()
        if not self.has_room(slot, state):
            return self.remove_slot()
        self.add(Load(name=state.name, slot=slot))
        self.scripts[slot] = self.chance.choice((self.scripts.get(state.slot, 0), self.chance.randrange(SCRIPTS)))

    # -- memory

    def remove_tail(self) -> None:
        """The end of a slot, as for a prompt that goes another way; memory that cannot do that must say so."""
        used = self.used()
        if not used:
            return self.decode_one_prompt()
        slot = self.chance.choice(used)
        held, end = self.held(slot), self.ends.get(slot, 0)
        count = min(len(held.positions), self.chance.choice((1, 2, 3, 5, self.length())))
        if not self.recipe.partial_removal:
            # A checkpoint set back puts the end before what the other half of memory still holds.
            p0 = end - count
            refused = self.context.n_rs_seq is UNSET and not held.doubt and held.positions[0] < p0 < end
            if refused and self.chance.random() < 0.3:
                self.add(SeqRm(slot=slot, p0=p0, returns=False))
                return None
            return self.go_back()
        self._cut(slot, end - count)
        if self.chance.random() < 0.6:
            self.scripts[slot] = self.chance.randrange(SCRIPTS)
        return None

    def _cut(self, slot: int, p0: int) -> None:
        """Remove a slot from position p0 on; where that is in a gap, from the end of what is before it."""
        before = [position for position in self.held(slot).positions if position < p0]
        self.add(SeqRm(slot=slot, p0=max(before) + 1 if before else 0))

    def remove_middle(self) -> None:
        """A part in the middle: what follows keeps its positions."""
        long = [slot for slot in self.used() if len(self.held(slot).positions) > 3 and not self.held(slot).doubt]
        if not long:
            return self.decode_one_prompt()
        slot = self.chance.choice(long)
        first, last = min(self.held(slot).positions), self.ends[slot] - 1
        p0 = self.chance.randint(first, last - 2)
        self.add(SeqRm(slot=slot, p0=p0, p1=self.chance.randint(p0 + 1, last - 1)))
        return None

    def take_back(self) -> None:
        """What a server does with a draft: several tokens are decoded, those that were guessed wrong are taken back."""
        slot = self._slot()
        snapshots = int(self.context.n_rs_seq) if self.context.n_rs_seq is not UNSET else 0
        before = self.ends.get(slot, 0)
        self._decode({slot: self.chance.randint(2, snapshots + 1)})
        count = min(snapshots, self.fresh.get(slot, 0))
        if count > 0 and self.ends.get(slot, 0) > before and not self.held(slot).doubt:
            self.add(SeqRm(slot=slot, p0=self.ends[slot] - self.chance.randint(1, count)))
            self.scripts[slot] = self.chance.randrange(SCRIPTS)

    def remove_nothing(self) -> None:
        """What a server calls before each prompt: beyond the end there is nothing to remove."""
        slot = self._slot()
        self.add(SeqRm(slot=slot, p0=self.ends.get(slot, 0)))

    def remove_slot(self) -> None:
        """All of a slot."""
        slot = self._slot()
        self.add(SeqRm(slot=slot, p0=self.chance.choice((-1, 0)), p1=-1))

    def remove_every_slot(self) -> None:
        """All of all slots in one call."""
        self.add(SeqRm(slot=-1))

    def _can_shift(self) -> bool:
        return self.recipe.shift and (self.recipe.window == 0 or self.context.swa_full)

    def shift_context(self) -> None:
        """A part in the middle is removed and the rest moved up, as a server does with a full context."""
        long = [slot for slot in self.used() if len(self.held(slot).positions) > 8 and not self.held(slot).doubt]
        if not long or not self._can_shift() or not self.recipe.partial_removal:
            return self.remove_slot()
        slot = self.chance.choice(long)
        end, low = self.ends[slot], min(self.held(slot).positions)
        keep = low + self.chance.choice((0, 1, 4, (end - low) // 3))
        discard = self.chance.randint(1, max(1, (end - keep) // 2))
        self.add(SeqRm(slot=slot, p0=keep, p1=keep + discard))
        self.add(SeqAdd(slot=slot, delta=-discard, p0=keep + discard, p1=self.chance.choice((-1, end))))

    def shift_slot(self) -> None:
        """All of a slot to later positions, or back."""
        used = [slot for slot in self.used() if not self.held(slot).doubt]
        if not used or not self._can_shift():
            return self.decode_one_prompt()
        slot = self.chance.choice(used)
        low = min(self.held(slot).positions)
        delta = -low if low and self.chance.random() < 0.5 else self.chance.choice((1, 3, 7, 20))
        self.add(SeqAdd(slot=slot, delta=delta))

    def _pair(self) -> tuple[int, int] | None:
        used = [slot for slot in self.used() if not self.held(slot).doubt]
        if not used or len(self.slots) < 2:
            return None
        slot = self.chance.choice(used)
        return slot, self.chance.choice([other for other in self.slots if other != slot])

    def copy_slot(self) -> None:
        """All of a slot also belongs to another, which was emptied."""
        pair = self._pair()
        if pair is None:
            return self.decode_one_prompt()
        slot, into = pair
        if self.held(into) != Slot():
            self.add(SeqRm(slot=into))
        self.add(SeqCp(slot=slot, into=into))
        self.scripts[into] = self.chance.choice((self.scripts.get(slot, 0), self.chance.randrange(SCRIPTS)))

    def copy_part(self) -> None:
        """The beginning of a slot also belongs to another, which was emptied; or its end."""
        pair = self._pair()
        if pair is None or len(self.held(pair[0]).positions) < 2:
            return self.decode_one_prompt()
        slot, into = pair
        if self.held(into) != Slot():
            self.add(SeqRm(slot=into))
        # After a cell that is there: what comes next has to follow it.
        middle = self.chance.choice(self.held(slot).positions[:-1]) + 1
        if self.chance.random() < 0.2 and self.recipe.partial_removal and self.context.kv_unified:
            self.add(SeqCp(slot=slot, into=into, p0=middle))
        else:
            self.add(SeqCp(slot=slot, into=into, p0=0, p1=middle))

    def keep_one(self) -> None:
        """Every other slot is emptied."""
        self.add(SeqKeep(slot=self._slot()))

    def clear(self) -> None:
        """Everything is emptied."""
        self.add(Clear(data=self.chance.random() < 0.7))

    def reopen(self) -> None:
        """The server starts again; what was saved to files and memory is there."""
        self.states = {name: state for name, state in self.states.items() if state.saved}
        self.add(Reopen(context=self.context))
