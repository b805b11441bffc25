"""A llama_batch over numpy arrays: what a decode is given, filled at once and used again."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isolate.library.bind import Library

Tokens = npt.NDArray[np.int32]


def floats(address: Any, count: int) -> npt.NDArray[np.float32]:
    """A view of so many floats from a pointer on: what np.ctypeslib.as_array gives, at a fifth of its cost."""
    there = (ctypes.c_float * count).from_address(ctypes.addressof(address.contents))
    return np.frombuffer(memoryview(there).cast("B"), np.float32)


@dataclass
class Fed:
    """A run as it was decoded: which tokens, at which positions."""

    slot: int
    tokens: Tokens
    start: int


class Batch:
    """A llama_batch over numpy arrays that are filled at once and used again."""

    def __init__(self, library: Library) -> None:
        self.structure = library.LlamaBatch()
        self.capacity = 0

    def fill(self, fed: list[Fed], outputs: list[list[int]]) -> None:
        """Set the batch to these runs; `outputs` are, for each run, the indices of tokens that get logits."""
        count = sum(len(run.tokens) for run in fed)
        if count > self.capacity or self.capacity == 0:
            self._grow(max(count, 2 * self.capacity, 1))
        self.logits[:count] = 0
        place = 0
        for run, wanted in zip(fed, outputs, strict=True):
            end = place + len(run.tokens)
            self.token[place:end] = run.tokens
            self.pos[place:end] = run.start + self._count[: len(run.tokens)]
            self.seq[place:end] = run.slot
            for index in wanted:
                self.logits[place + index] = 1
            place = end
        self.structure.n_tokens = count

    def _grow(self, capacity: int) -> None:
        self.capacity = capacity
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.seq = np.zeros(capacity, np.int32)
        self.logits = np.zeros(capacity, np.int8)
        self._one = np.ones(capacity, np.int32)
        self._count = np.arange(capacity, dtype=np.int32)
        self._rows = self.seq.ctypes.data + 4 * np.arange(capacity, dtype=np.uintp)
        for name, array in (
            ("token", self.token),
            ("pos", self.pos),
            ("n_seq_id", self._one),
            ("seq_id", self._rows),
            ("logits", self.logits),
        ):
            setattr(self.structure, name, array.ctypes.data)
