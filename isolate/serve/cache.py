"""The server's prompt cache: whole states of slots in host memory (`--cache-ram`), with their checkpoints.

Rules of llama.cpp 0.3.36, as observed from a recorded server: a prompt that is cached already is not saved again; saving
one removes those that are its beginnings; the oldest go when the limit is passed; one is taken out and used when it
keeps more of itself and matches more of the new prompt than the slot's own tokens do, and keeps a quarter at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from isolate.serve.requests import Symbol

#: Share of a cached prompt that must be in the new one.
KEEPS = 0.25


@dataclass
class Kept:
    """A context checkpoint: its name in the case, and what the server remembers of it."""

    name: str
    task: int
    tokens: int
    first: int
    last: int
    size: int


@dataclass
class Prompt:
    """What a slot holds: tokens, and the checkpoints taken on the way."""

    tokens: list[Symbol] = field(default_factory=list)
    checkpoints: list[Kept] = field(default_factory=list)
    #: first position in memory, where the kind of memory does not say it
    low: int = 0
    #: cells were moved, so that positions must be said
    moved: bool = False

    def copy(self) -> Prompt:
        """The same, not shared."""
        return Prompt(list(self.tokens), list(self.checkpoints), self.low, self.moved)


@dataclass
class Entry:
    """A cached prompt and the name of its state in the case."""

    name: str
    prompt: Prompt
    size: int

    def whole(self) -> int:
        """Bytes with its checkpoints."""
        return self.size + sum(kept.size for kept in self.prompt.checkpoints)


def common(one: Sequence[Symbol], other: Sequence[Symbol]) -> int:
    """Length of the common beginning."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


class PromptCache:
    """The entries, oldest first. `limit` is in bytes; None: no limit."""

    def __init__(self, limit: int | None, tokens: int) -> None:
        self.limit = limit
        self.least_tokens = tokens
        self.entries: list[Entry] = []

    def admit(self, prompt: Prompt, size: int, name: str) -> bool:
        """Make room for a slot's prompt and add it; False when it is there already or is too large."""
        if any(common(entry.prompt.tokens, prompt.tokens) == len(prompt.tokens) for entry in self.entries):
            return False
        entry = Entry(name, prompt.copy(), size)
        if self.limit is not None and entry.whole() > self.limit:
            return False
        self.entries = [
            other for other in self.entries if common(other.prompt.tokens, prompt.tokens) != len(other.prompt.tokens)
        ]
        self._evict(entry.whole())
        self.entries.append(entry)
        return True

    def best(self, prompt: Prompt, wanted: Sequence[Symbol]) -> Entry | None:
        """Takes out the entry that serves a new prompt better than what the slot has; None when there is none."""
        shared = common(prompt.tokens, wanted)
        keeps = shared / len(prompt.tokens) if prompt.tokens else -1.0
        matches = shared / len(wanted)
        found = None
        for entry in self.entries:
            shared = common(entry.prompt.tokens, wanted)
            if shared / len(entry.prompt.tokens) < KEEPS:
                continue
            if keeps < shared / len(entry.prompt.tokens) and matches < shared / len(wanted):
                keeps, matches, found = shared / len(entry.prompt.tokens), shared / len(wanted), entry
        if found is not None:
            self.entries.remove(found)
        return found

    def update(self) -> None:
        """Drops the oldest while the limits are passed: bytes, and tokens beyond what fits into the bytes."""
        self._evict(0)
        if self.limit is None:
            most = self.least_tokens
        else:
            each = max(1.0, self._size() / max(1, self._tokens()))
            most = max(self.least_tokens, int(self.limit / each))
        while self.entries and self._tokens() > most:
            self.entries.pop(0)

    def _evict(self, more: int) -> None:
        while self.limit is not None and self.entries and self._size() + more > self.limit:
            self.entries.pop(0)

    def _size(self) -> int:
        return sum(entry.whole() for entry in self.entries)

    def _tokens(self) -> int:
        return sum(len(entry.prompt.tokens) for entry in self.entries)
