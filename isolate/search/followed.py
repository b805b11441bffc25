"""Steps appended one by one, and what each slot and state holds after them, as the oracles' reference knows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from isolate.case import (
    Checkpoint,
    Context,
    Decode,
    Load,
    Pattern,
    Reopen,
    Restore,
    Run,
    Save,
    SeqCp,
    Step,
)
from isolate.recipes import VOCABULARY, Recipe
from isolate.replay.batch import Fed
from isolate.replay.engine import Result
from isolate.replay.reference import Reference, Slot
from isolate.search.without import slot_cells
from isolate.steps import ends_after


@dataclass(frozen=True)
class State:
    """A state that was taken."""

    name: str
    slot: int
    held: Slot
    end: int
    #: of the second half of memory only: good while the slot still has the tokens before it
    partial: bool
    on_device: bool
    saved: bool


class Followed:
    """The steps of one case so far, and what each slot holds after them."""

    def __init__(self, recipe: Recipe, context: Context) -> None:
        self.recipe = recipe
        self.context = context
        self.reference = Reference(recipe.memory, recipe.window)
        self.steps: list[Step] = []
        self.ends: dict[int, int] = {}
        self.states: dict[str, State] = {}
        #: tokens of a slot that a snapshot can take back: a server takes back the end of what it just decoded
        self.fresh: dict[int, int] = {}
        #: cells that belong to two slots are counted once by the library, so its room is not known exactly
        self.shared = False
        self.slots = range(context.n_seq_max)

    def add(self, step: Step) -> None:
        """Append a step, and follow what it does."""
        self.steps.append(step)
        code = 1
        fed: list[Fed] = []
        slot: int | None = None
        match step:
            case Decode():
                code = 0 if step.returns is UNSET else int(step.returns)
                for run in step.batch:
                    start = self.ends.get(run.slot, 0) if run.at is UNSET else int(run.at)
                    tokens = self._tokens(run)
                    fed.append(Fed(run.slot, np.array(tokens, np.int32), start))
                    if code == 0:
                        self.ends[run.slot] = start + len(tokens)
            case Checkpoint() | Save():
                self._taken(step)
            case Restore() | Load():
                state = self.states[step.name]
                slot = state.slot if step.slot is UNSET else int(step.slot)
                code = 1 if step.returns is UNSET else int(step.returns)
                if code:
                    self.ends[slot] = state.end
            case Reopen():
                self.ends.clear()
                self.context = step.context
            case _:
                code = 1 if step.returns is UNSET else int(step.returns)
                if code:
                    self.ends = ends_after(self.ends, step)
        self.reference.after(step, Result(code, fed, slot=slot))
        self.fresh = {run.slot: len(run.tokens) - 1 for run in fed} if code == 0 else {}
        self.shared |= isinstance(step, SeqCp)

    def _tokens(self, run: Run) -> list[int]:
        """The tokens of a run; one that only a run of the case can tell is like no other."""
        if isinstance(run.tokens, Pattern):
            return run.tokens.tokens()
        return [VOCABULARY + len(self.steps)] if run.tokens == "greedy" else list(run.tokens)

    def _taken(self, step: Checkpoint | Save) -> None:
        flags = step.flags if isinstance(step, Checkpoint) else []
        if "on_device" in flags:
            # One live state a slot: the older one is gone.
            self.states = {name: s for name, s in self.states.items() if not (s.on_device and s.slot == step.slot)}
        partial = "partial_only" in flags and self.recipe.memory in ("window", "hybrid")
        held, end = self.reference.slot(step.slot), self.ends.get(step.slot, 0)
        self.states[step.name] = State(
            step.name, step.slot, held, end, partial, "on_device" in flags, isinstance(step, Save)
        )

    def held(self, slot: int) -> Slot:
        return self.reference.slot(slot)

    def used(self) -> list[int]:
        """Slots that hold something that is known."""
        return [slot for slot in self.slots if self.held(slot).positions and not self.held(slot).unknown]

    def room(self, slot: int) -> int:
        """Tokens that a slot can still take."""
        sharing = self.slots if self.context.kv_unified else [slot]
        return slot_cells(self.context) - sum(len(self.held(other).positions) for other in sharing)

    def usable(self, slot: int) -> list[State]:
        """Checkpoints that a server would set back into a slot: of the beginning of what the slot holds."""
        held = self.held(slot)
        found = []
        for state in self.states.values():
            if state.saved or state.slot != slot or state.held.doubt or state.held.unknown:
                continue
            count = len(state.held.tokens)
            plain = held.history is None and state.held.history is None and not held.moved and not state.held.moved
            if (not state.partial and self.has_room(slot, state)) or (
                state.partial
                and plain
                and not held.unknown
                and held.tokens[:count] == state.held.tokens
                and held.positions[:count] == state.held.positions
            ):
                found.append(state)
        return found

    def has_room(self, slot: int, state: State) -> bool:
        """The cells of a whole state fit into a slot, once it is emptied."""
        shared = self.shared and self.context.kv_unified
        free = 0 if shared else len(self.held(slot).positions)
        return self.room(slot) + free >= len(state.held.positions)
