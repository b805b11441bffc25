"""The layer between the engine and the library that planted faults are made in.

What is wrong is wrong for the context that the engine opened. The oracles' own contexts stay right: they are told apart by
the check of its settings, which only the engine asks for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isolate.library.bind import Library
from isolate.library.find import Build
from isolate.library.prototypes import PROTOTYPES

#: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY of llama.h.
PARTIAL = 1
#: Where a recurrent state has its position: after magic, slot and number of cells (state_write_meta).
POSITION_AT = 12


@dataclass(frozen=True)
class Fed:
    """A token of a batch."""

    token: int
    position: int
    slot: int
    output: bool


class Faulty:
    """A library as it is; a mutant overrides what it does wrong. Calls on other contexts never get here."""

    def __init__(self, build: Build, before: Sequence[Path] = ()) -> None:
        self.right = Library(build, before)
        self.context = 0
        self.memory = 0
        self._given: list[np.ndarray[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.right, name)
        if name in PROTOTYPES:
            setattr(self, name, found)
        return found

    def check_context(self, context: int, params: ctypes.Structure) -> None:
        """As the library's; from here on this is the context in which things go wrong."""
        self.right.check_context(context, params)
        self.context, self.memory = context, self.right.llama_get_memory(context)
        self.params: Any = params
        self.slots = range(max(1, params.n_seq_max))
        model = self.right.llama_get_model(context)
        self.hybrid = bool(self.right.llama_model_is_hybrid(model))
        self.recurrent = self.hybrid or bool(self.right.llama_model_is_recurrent(model))
        self.window = max(0, self.right.llama_model_n_swa(model))
        self.vocabulary = self.right.llama_vocab_n_tokens(self.right.llama_model_get_vocab(model))
        #: tokens of the last batch
        self.fed: list[Fed] = []
        self.begin()

    def begin(self) -> None:
        """A context was opened: forget the one before."""

    # -- what a mutant may override, for the context under test

    def decode(self, batch: Any) -> int:
        return int(self.right.llama_decode(self.context, batch))

    def logits(self, index: int) -> Any:
        return self.right.llama_get_logits_ith(self.context, index)

    def size(self, slot: int, flags: int) -> int:
        return int(self.right.llama_state_seq_get_size_ext(self.context, slot, flags))

    def take(self, data: Any, size: int, slot: int, flags: int) -> int:
        return int(self.right.llama_state_seq_get_data_ext(self.context, data, size, slot, flags))

    def put(self, data: Any, size: int, slot: int, flags: int) -> int:
        return int(self.right.llama_state_seq_set_data_ext(self.context, data, size, slot, flags))

    def put_file(self, path: bytes, slot: int, tokens: Any, capacity: int, count: Any) -> int:
        return int(self.right.llama_state_seq_load_file(self.context, path, slot, tokens, capacity, count))

    def remove(self, slot: int, p0: int, p1: int) -> bool:
        return bool(self.right.llama_memory_seq_rm(self.memory, slot, p0, p1))

    def copy(self, slot: int, into: int, p0: int, p1: int) -> None:
        self.right.llama_memory_seq_cp(self.memory, slot, into, p0, p1)

    def shift(self, slot: int, p0: int, p1: int, delta: int) -> None:
        self.right.llama_memory_seq_add(self.memory, slot, p0, p1, delta)

    def keep(self, slot: int) -> None:
        self.right.llama_memory_seq_keep(self.memory, slot)

    def clear(self, data: bool) -> None:
        self.right.llama_memory_clear(self.memory, data)

    def oldest(self, slot: int) -> int:
        return int(self.right.llama_memory_seq_pos_min(self.memory, slot))

    def newest(self, slot: int) -> int:
        return int(self.right.llama_memory_seq_pos_max(self.memory, slot))

    # -- what mutants are made with: right calls on the context under test

    def drop(self, slot: int, p0: int, p1: int) -> None:
        """Remove positions, rightly."""
        self.right.llama_memory_seq_rm(self.memory, slot, p0, p1)

    def move(self, slot: int, p0: int, p1: int) -> None:
        """Move positions one further, where the memory lets them move."""
        if self.right.llama_memory_can_shift(self.memory):
            self.right.llama_memory_seq_add(self.memory, slot, p0, p1, 1)

    def end(self, slot: int) -> int:
        """The position after a slot's newest, rightly; 0 for an empty slot, and for none."""
        return 0 if slot not in self.slots else int(self.right.llama_memory_seq_pos_max(self.memory, slot)) + 1

    def count(self, slot: int) -> int:
        """Positions from a slot's oldest to its newest, rightly."""
        if slot not in self.slots:
            return 0
        low = int(self.right.llama_memory_seq_pos_min(self.memory, slot))
        return self.end(slot) - low if low >= 0 else 0

    def hole(self, slot: int, at: int) -> None:
        """Lose a cell that is neither a slot's first nor its last, so that its positions tell nothing."""
        low = int(self.right.llama_memory_seq_pos_min(self.memory, slot))
        if not self.recurrent and 0 <= low < at < self.end(slot) - 1:
            self.drop(slot, at, at + 1)

    def state(self, slot: int, flags: int = 0) -> bytes:
        """A slot's state, rightly."""
        size = self.right.llama_state_seq_get_size_ext(self.context, slot, flags)
        data = ctypes.create_string_buffer(max(1, size))
        moved = self.right.llama_state_seq_get_data_ext(self.context, data, size, slot, flags)
        return data.raw[:moved]

    def set_state(self, data: bytes, slot: int, flags: int = 0) -> None:
        """Set a slot's state, rightly."""
        self.right.llama_state_seq_set_data_ext(self.context, data, len(data), slot, flags)

    def set_recurrent(self, data: bytes, slot: int, position: int) -> None:
        """Set what recurrent layers hold of a slot, with another position; only in recurrent and hybrid models."""
        at = position.to_bytes(4, "little", signed=True)
        self.set_state(data[:POSITION_AT] + at + data[POSITION_AT + 4 :], slot, PARTIAL)

    def room(self) -> int:
        """Cells that one slot has, or all of them share."""
        return int(self.right.llama_n_ctx_seq(self.context))

    def others(self, slot: int) -> list[int]:
        """Other slots that hold something."""
        return [other for other in self.slots if other != slot and self.end(other) > 0]

    def row(self, index: int) -> np.ndarray[Any, Any] | None:
        """A row of logits, rightly; None where there is none."""
        address = self.right.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(address, (self.vocabulary,)) if address else None

    def given(self, row: np.ndarray[Any, Any]) -> Any:
        """A row that is not the library's, as the library would give it."""
        self._given.append(np.array(row, np.float32))
        return self._given[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    # -- the calls, told apart by context

    def llama_decode(self, context: int, batch: Any) -> int:
        if context != self.context:
            return int(self.right.llama_decode(context, batch))
        self.fed = _read(batch)
        self._given.clear()
        return self.decode(batch)

    def llama_free(self, context: int) -> None:
        self.right.llama_free(context)
        if context == self.context:
            self.context = self.memory = 0

    def llama_get_logits_ith(self, context: int, index: int) -> Any:
        if context != self.context:
            return self.right.llama_get_logits_ith(context, index)
        return self.logits(index)

    def llama_state_seq_get_size_ext(self, context: int, slot: int, flags: int) -> int:
        if context != self.context:
            return int(self.right.llama_state_seq_get_size_ext(context, slot, flags))
        return self.size(slot, flags)

    def llama_state_seq_get_data_ext(self, context: int, data: Any, size: int, slot: int, flags: int) -> int:
        if context != self.context:
            return int(self.right.llama_state_seq_get_data_ext(context, data, size, slot, flags))
        return self.take(data, size, slot, flags)

    def llama_state_seq_set_data_ext(self, context: int, data: Any, size: int, slot: int, flags: int) -> int:
        if context != self.context:
            return int(self.right.llama_state_seq_set_data_ext(context, data, size, slot, flags))
        return self.put(data, size, slot, flags)

    def llama_state_seq_load_file(
        self, context: int, path: bytes, slot: int, tokens: Any, capacity: int, count: Any
    ) -> int:
        if context != self.context:
            return int(self.right.llama_state_seq_load_file(context, path, slot, tokens, capacity, count))
        return self.put_file(path, slot, tokens, capacity, count)

    def llama_memory_seq_rm(self, memory: int, slot: int, p0: int, p1: int) -> bool:
        if memory != self.memory:
            return bool(self.right.llama_memory_seq_rm(memory, slot, p0, p1))
        return self.remove(slot, p0, p1)

    def llama_memory_seq_cp(self, memory: int, slot: int, into: int, p0: int, p1: int) -> None:
        if memory != self.memory:
            self.right.llama_memory_seq_cp(memory, slot, into, p0, p1)
        else:
            self.copy(slot, into, p0, p1)

    def llama_memory_seq_add(self, memory: int, slot: int, p0: int, p1: int, delta: int) -> None:
        if memory != self.memory:
            self.right.llama_memory_seq_add(memory, slot, p0, p1, delta)
        else:
            self.shift(slot, p0, p1, delta)

    def llama_memory_seq_keep(self, memory: int, slot: int) -> None:
        if memory != self.memory:
            self.right.llama_memory_seq_keep(memory, slot)
        else:
            self.keep(slot)

    def llama_memory_clear(self, memory: int, data: bool) -> None:
        if memory != self.memory:
            self.right.llama_memory_clear(memory, data)
        else:
            self.clear(data)

    def llama_memory_seq_pos_min(self, memory: int, slot: int) -> int:
        if memory != self.memory:
            return int(self.right.llama_memory_seq_pos_min(memory, slot))
        return self.oldest(slot)

    def llama_memory_seq_pos_max(self, memory: int, slot: int) -> int:
        if memory != self.memory:
            return int(self.right.llama_memory_seq_pos_max(memory, slot))
        return self.newest(slot)


def _read(batch: Any) -> list[Fed]:
    """The tokens of a llama_batch."""
    count = batch.n_tokens
    tokens, positions = (ctypes.cast(at, ctypes.POINTER(ctypes.c_int32))[:count] for at in (batch.token, batch.pos))
    rows = ctypes.cast(batch.seq_id, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
    outputs = ctypes.cast(batch.logits, ctypes.POINTER(ctypes.c_int8))[:count]
    slots = [rows[place][0] for place in range(count)]
    return [Fed(*read) for read in zip(tokens, positions, slots, map(bool, outputs), strict=True)]
