"""One-slot contexts that go through what a slot went through, alone: where the right logits come from.

A context is used again as long as it can be: extended by what is new, its tail taken back where memory allows it. It has as
many positions as a slot of the context under test, since some models scale by that, and gets its tokens in other batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from isolate.replay.batch import Batch, Fed, floats
from isolate.replay.reference import Act, Decoded, Kind, Moved, Removed

if TYPE_CHECKING:
    from isolate.case import Context
    from isolate.library.bind import Library

Logits = npt.NDArray[np.float32]

#: Rows decoded again with a single new one, where memory allows it: kernels for one row are not those for several.
_AGAIN = 3
#: Bytes of reference logits kept from one case to the next.
_REMEMBERED = 64 << 20
#: Bytes of logits that are asked for beyond those wanted, when they are decoded anyway.
_ROWS_AT_ONCE = 1 << 20


class NotAlone(Exception):
    """A slot's acts cannot be gone through alone; says why."""


@dataclass
class Memo:
    """Reference logits by what was decoded up to them. Good for one model and one set of settings."""

    rows: dict[bytes, Logits] = field(default_factory=dict)
    size: int = 0

    def keep(self, key: bytes, row: Logits) -> None:
        """Remember a row; all is forgotten when there is too much."""
        self.size += row.nbytes
        if self.size > _REMEMBERED:
            self.rows.clear()
            self.size = row.nbytes
        self.rows[key] = row


class Single:
    """A context with one slot: acts that came before, and the run of tokens it holds since."""

    def __init__(
        self, library: Library, model: int, settings: Context, positions: int, eval_callback: Any = None
    ) -> None:
        self.library = library
        params = library.context_params()
        library.set_params(params, settings.for_one_slot(positions), "context")
        if eval_callback is not None:
            library.set_params(params, {"cb_eval": eval_callback}, "context")
        self.context = library.llama_init_from_model(model, params)
        if not self.context:
            raise NotAlone("the build made no second context")
        self.memory = library.llama_get_memory(self.context)
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self.batch = Batch(library)
        self.most = library.llama_n_ubatch(self.context)
        self.before: tuple[Act, ...] = ()
        self.tokens: tuple[int, ...] = ()
        self.start = 0

    def close(self) -> None:
        """Free the context."""
        self.library.llama_free(self.context)

    def forget(self) -> None:
        """Empty it."""
        if self.memory:
            self.library.llama_memory_clear(self.memory, True)
        self.before, self.tokens = (), ()

    def shares(self, acts: tuple[Act, ...]) -> int:
        """How many tokens of the last act it holds after the same acts before; 0 where those differ."""
        last = acts[-1]
        if self.before != acts[:-1] or not isinstance(last, Decoded) or self.start != last.positions[0]:
            return 0
        pairs = enumerate(zip(self.tokens, last.tokens, strict=False))
        return next((index for index, (one, other) in pairs if one != other), min(len(self.tokens), len(last.tokens)))

    def act(self, act: Act) -> None:
        """Do one act that gives no logits."""
        match act:
            case Decoded():
                self.decode(act.tokens, act.positions[0], set())
            case Removed():
                if not self.library.llama_memory_seq_rm(self.memory, 0, act.p0, act.p1):
                    raise NotAlone(f"removing positions {act.p0} to {act.p1} alone was refused")
            case Moved():
                self.library.llama_memory_seq_add(self.memory, 0, act.p0, act.p1, act.delta)

    def decode(self, tokens: Sequence[int], start: int, wanted: set[int]) -> dict[int, Logits]:
        """Decode tokens from `start`, an ubatch at a time; logits of the wanted positions.

        A batch of several ubatches can go wrong alone, too, where cells were removed before.
        """
        found = {}
        for first in range(0, len(tokens), self.most):
            part = np.array(tokens[first : first + self.most], np.int32)
            at = start + first
            outputs = [index for index in range(len(part)) if at + index in wanted]
            self.batch.fill([Fed(0, part, at)], [outputs])
            code = self.library.llama_decode(self.context, self.batch.structure)
            if code != 0:
                raise NotAlone(f"llama_decode returned {code} for it alone")
            for index in outputs:
                address = self.library.llama_get_logits_ith(self.context, index)
                if not address:
                    raise NotAlone("llama_decode gave no logits for it alone")
                found[at + index] = floats(address, self.vocabulary).copy()
        return found


class Alone:
    """The one-slot contexts of a case, and the logits they gave."""

    def __init__(
        self, library: Library, model: int, settings: Context, positions: int, kind: Kind, reach: int, memo: Memo
    ) -> None:
        self.library = library
        self.model = model
        self.settings = settings
        self.positions = positions
        self.kind = kind
        self.reach = reach
        self.memo = memo
        self.most = min(8, settings.n_seq_max + 1)
        #: the one used last is at the end
        self.contexts: list[Single] = []

    def close(self) -> None:
        """Free all contexts; the logits stay remembered."""
        for context in self.contexts:
            context.close()
        self.contexts.clear()

    def rows(self, acts: tuple[Act, ...], wanted: Sequence[int]) -> dict[int, Logits]:
        """Logits at the wanted positions, which lie in the last act. NotAlone where they cannot be had."""
        keys = _keys(acts, wanted)
        found = {position: self.memo.rows[key] for position, key in keys.items() if key in self.memo.rows}
        missing = {position for position in wanted if position not in found}
        if missing:
            context = self._nearest(acts)
            try:
                computed = self._compute(context, acts, missing)
            except NotAlone:
                context.forget()
                raise
            for position, key in _keys(acts, list(computed)).items():
                self.memo.keep(key, computed[position])
            found |= computed
        return found

    def fresh_rows(self, acts: tuple[Act, ...], wanted: Sequence[int]) -> dict[int, Logits]:
        """The same from a context that has done nothing else; what was computed before is forgotten."""
        self.close()
        for key in _keys(acts, wanted).values():
            self.memo.rows.pop(key, None)
        return self.rows(acts, wanted)

    def _nearest(self, acts: tuple[Act, ...]) -> Single:
        """The context that has most of this done already, or an empty one."""
        nearest = max(self.contexts, key=lambda context: context.shares(acts), default=None)
        if nearest is None or nearest.shares(acts) == 0:
            if len(self.contexts) < self.most:
                nearest = Single(self.library, self.model, self.settings, self.positions)
                self.contexts.append(nearest)
            else:
                nearest = self.contexts[0]
        self.contexts.remove(nearest)
        self.contexts.append(nearest)
        return nearest

    def _compute(self, context: Single, acts: tuple[Act, ...], wanted: set[int]) -> dict[int, Logits]:
        last = acts[-1]
        assert isinstance(last, Decoded)
        first = min(index for index, position in enumerate(last.positions) if position in wanted)
        kept = self._take_back(context, last, min(context.shares(acts), first))
        if kept == 0:
            context.forget()
            for act in acts[:-1]:
                context.act(act)
            context.before, context.start = acts[:-1], last.positions[0]
        new = last.positions[kept:]
        if 4 * context.vocabulary * len(new) <= _ROWS_AT_ONCE:
            # The next case asks for others of them: what was decoded once need not be decoded again.
            wanted = wanted | set(new)
        found = context.decode(last.tokens[kept:], new[0], wanted)
        context.tokens = last.tokens
        return found

    def _take_back(self, context: Single, last: Decoded, kept: int) -> int:
        """Leave the first `kept` tokens of the run in a context; how many are left, 0 where it has to begin again."""
        if kept == 0 or self.kind in ("recurrent", "hybrid"):
            return kept if kept == len(context.tokens) else 0
        if len(last.tokens) - kept == 1:
            kept = max(0, kept - _AGAIN)
        if kept == len(context.tokens) or kept == 0:
            return kept
        end = last.positions[kept]
        oldest = self.library.llama_memory_seq_pos_min(context.memory, 0)
        if self.kind == "window" and oldest > max(context.start, end - self.reach + 1):
            return 0
        return kept if self.library.llama_memory_seq_rm(context.memory, 0, end, -1) else 0


def _keys(acts: tuple[Act, ...], positions: Iterable[int]) -> dict[int, bytes]:
    """What the logits at each position, which lies in the last act, depend on: all acts up to it."""
    last = acts[-1]
    assert isinstance(last, Decoded)
    digest = hashlib.blake2b(repr(acts[:-1]).encode(), digest_size=16)
    digest.update(last.positions[0].to_bytes(8, "little", signed=True))
    tokens = np.array(last.tokens, np.int32)
    done, found = 0, {}
    for position in sorted(positions):
        count = position - last.positions[0] + 1
        digest.update(tokens[done:count].tobytes())
        done, found[position] = count, digest.copy().digest()
    return found
