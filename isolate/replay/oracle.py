"""What must hold after each step: positions, finite logits, states that keep their cells, and logits of a slot alone.

Every check can be left out. What a check cannot judge it says in `notes`, and never passes in silence.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from isolate.case import Check, Checkpoint, Load, Reopen, Restore, Save, SeqAdd, SeqCp, SeqRm, Step
from isolate.fault import Call, Fault, Signature
from isolate.replay import again, cells
from isolate.replay.counters import Counters
from isolate.replay.engine import Engine, Kept, Result
from isolate.replay.judge import NO_ROPE, Judge
from isolate.replay.reference import Kind, Reference
from isolate.zoo import ZOO

#: LLAMA_STATE_SEQ_FLAGS_* of llama.h.
_PARTIAL, _ON_DEVICE = 1, 2
#: Bytes before the tokens in a file of a slot's state: magic, version, number of tokens (llama_state_seq_save_file).
_FILE_HEADER = 12


class Oracle:
    """The checks of one case. Call `after` when a step was done, and `close` at the end."""

    def __init__(self, engine: Engine, checks: Iterable[Check]) -> None:
        self.engine = engine
        self.library = engine.library
        self.checks = frozenset(checks)
        self.notes: list[str] = []
        self.reach = max(0, self.library.llama_model_n_swa(engine.models.handle))
        self.kind = self._kind()
        rope = self.library.llama_model_rope_type(engine.models.handle)
        self.reference = Reference(self.kind, self.reach, relative=rope != NO_ROPE or self.kind == "recurrent")
        self.judge = Judge(engine, self.kind, self.reach, self._note)
        self.scratch: int | None = None
        self.counters = Counters(engine) if "counters" in self.checks else None

    def close(self) -> None:
        """Free the contexts that were made to compare with."""
        if self.scratch:
            self.library.llama_free(self.scratch)
        self.scratch = None

    def after(self, index: int, step: Step, result: Result) -> Fault | None:
        """Look at what step `index` did; the first thing that is not as it should be."""
        if self.counters:
            self.counters.read()
        self.reference.after(step, result)
        if self.counters:
            self.counters.keep(index, step, self.reference)
        if isinstance(step, Reopen):
            self.close()
            self.judge = Judge(self.engine, self.kind, self.reach, self._note)
        if self.kind == "window" and isinstance(step, SeqRm | SeqCp | SeqAdd):
            for slot in list(self.reference.slots):
                self.reference.observe(slot, self._position("min", slot))
        checks = {"positions": self._positions, "nan": self._finite, "cells": self._cells, "logits": self._logits}
        for name, check in checks.items():
            fault = check(step, result) if name in self.checks else None
            if fault is not None:
                return fault
        if self.counters and index + 1 == len(self.engine.case.steps):
            return self.counters.fault()
        if self.counters:
            self.counters.leave_out()
        return None

    def _kind(self) -> Kind:
        """The kind of memory this model has in this build."""
        library, model = self.library, self.engine.models.handle
        if not self.engine.memory:
            return "none"
        if library.llama_model_is_recurrent(model):
            return "recurrent"
        if self._is_hybrid():
            return "hybrid"
        return "window" if self.reach > 0 else "attention"

    def _is_hybrid(self) -> bool:
        """Older builds cannot say whether a model is hybrid: there its architecture does, for those of the zoo."""
        library, model = self.library, self.engine.models.handle
        if library.has("llama_model_is_hybrid"):
            return bool(library.llama_model_is_hybrid(model))
        name = ctypes.create_string_buffer(64)
        library.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
        hybrid = {recipe.architecture for recipe in ZOO.values() if recipe.memory == "hybrid"}
        return name.value.decode(errors="replace") in hybrid

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _fault(self, kind: Check, call: str, said: str, evidence: dict[str, Any]) -> Fault:
        noticed = Call(call, None, said)
        in_flight = self.engine.in_flight
        signature = Signature(kind, call, None, in_flight.kind)
        return Fault(kind, signature, in_flight, noticed, noticed, said, evidence=evidence)

    # -- positions

    def _position(self, which: str, slot: int) -> int:
        return int(getattr(self.library, f"llama_memory_seq_pos_{which}")(self.engine.memory, slot))

    def _positions(self, step: Step, result: Result) -> Fault | None:
        if self.kind == "none":
            return None
        for slot in range(self.engine.settings.n_seq_max):
            low, high = self._position("min", slot), self._position("max", slot)
            held = self.reference.held(slot)
            if held is not None and not held.allows(low, high):
                said = f"slot {slot}: oldest and newest position are {low} and {high}, not {held}"
                evidence = {"slot": slot, "oldest": low, "newest": high, "expected": str(held), "memory": self.kind}
                range_ = again.Held(slot, _ends(held.oldest), _ends(held.newest), held.or_none)
                evidence["again"] = again.written(range_)
                return self._fault("positions", "llama_memory_seq_pos_min/max", said, evidence)
        return None

    # -- logits

    def _finite(self, step: Step, result: Result) -> Fault | None:
        for row in result.rows:
            logits = self.engine.logits(row)
            place = f"slot {row.slot}, position {row.position}"
            evidence = {"slot": row.slot, "position": row.position}
            if logits is None:
                return self._fault("nan", "llama_get_logits_ith", f"{place}: there are no logits", evidence)
            wrong = int(np.count_nonzero(~np.isfinite(logits)))
            if wrong:
                said = f"{place}: {wrong} of {len(logits)} logits are not finite"
                return self._fault("nan", "llama_get_logits_ith", said, evidence | {"not_finite": wrong})
        return None

    def _logits(self, step: Step, result: Result) -> Fault | None:
        if result.rows and self.kind == "none":
            self._note("logits: nothing was judged: this model keeps no memory")
            return None
        for slot in dict.fromkeys(row.slot for row in result.rows):
            rows = [row for row in result.rows if row.slot == slot]
            difference = self.judge.judge(slot, self.reference.slot(slot), rows)
            if difference is not None:
                return self._fault("logits", "llama_get_logits_ith", difference.said, difference.evidence)
        return None

    # -- states

    def _cells(self, step: Step, result: Result) -> Fault | None:
        """A state set in an equal context and taken again, or taken of the slot it was just set in, holds the same cells."""
        if not isinstance(step, Checkpoint | Save | Restore | Load) or not result.code:
            return None
        kept = self.engine.kept[step.name]
        assert result.slot is not None
        if not 0 <= result.slot < self.engine.settings.n_seq_max:
            # To ask about a slot that is not there would be a fault of ours.
            return None
        if kept.flags & _ON_DEVICE:
            self._note("cells: states on the device were not judged: to take one again is to lose it")
            return None
        if isinstance(step, Restore | Load):
            if not isinstance(step.damage, msgspec.UnsetType):
                return None
            again = self._take(self.engine.context, result.slot, kept.flags)
            return self._same(_content(kept), again, result.slot, kept.flags)
        context = self._scratch()
        if context is None:
            return None
        # a file holds a state in another wrapping than memory
        data = _content(kept) if kept.file is None else self._take(self.engine.context, result.slot, kept.flags)
        if not self._set(context, data, result.slot, kept.flags):
            said = f"slot {result.slot}: its state was refused by a new context with the same settings"
            return self._fault("cells", "llama_state_seq_set_data_ext", said, {"slot": result.slot})
        again = self._take(context, result.slot, kept.flags)
        self.library.llama_memory_clear(self.library.llama_get_memory(context), True)
        return self._same(_content(kept), again, result.slot, kept.flags)

    def _same(self, before: bytes, again: bytes, slot: int, flags: int) -> Fault | None:
        if before == again:
            return None
        one, other = self._read(before, flags), self._read(again, flags)
        if one is None or other is None:
            self._note("cells: not judged where a state is not of a format that is known")
            return None
        if one == other:
            return None
        what = "other cells" if one.positions != other.positions else "other contents in the same cells"
        said = f"slot {slot}: its state holds {what} after it was set and taken again"
        evidence = {"slot": slot, "positions": list(one.positions), "positions_again": list(other.positions)}
        return self._fault("cells", "llama_state_seq_get_data_ext", said, evidence)

    def _read(self, data: bytes, flags: int) -> cells.State | None:
        recurrent = self.kind in ("recurrent", "hybrid")
        whole = {"attention": 1, "window": 2, "hybrid": 1}.get(self.kind, 0)
        part = {"attention": 1, "window": 1}.get(self.kind, 0)
        state = cells.read(data, part, recurrent) if flags & _PARTIAL else None
        # older builds take the whole state of some kinds of memory, whatever the flags
        return state or cells.read(data, whole, recurrent)

    def _scratch(self) -> int | None:
        """A context with the settings of the one under test; None where the build makes no second one."""
        if self.scratch is None:
            params = self.library.context_params()
            self.library.set_params(params, self.engine.settings.settings(), "context")
            self.scratch = self.library.llama_init_from_model(self.engine.models.handle, params)
        if not self.scratch:
            self._note("cells: a saved state was not judged: the build made no second context")
            return None
        return self.scratch

    def _set(self, context: int, data: bytes, slot: int, flags: int) -> int:
        if flags == 0 and not self.library.has("llama_state_seq_set_data_ext"):
            return int(self.library.llama_state_seq_set_data(context, data, len(data), slot))
        return int(self.library.llama_state_seq_set_data_ext(context, data, len(data), slot, flags))

    def _take(self, context: int | None, slot: int, flags: int) -> bytes:
        library = self.library
        if flags == 0 and not library.has("llama_state_seq_get_data_ext"):
            data = ctypes.create_string_buffer(max(1, library.llama_state_seq_get_size(context, slot)))
            moved = library.llama_state_seq_get_data(context, data, len(data), slot)
        else:
            data = ctypes.create_string_buffer(max(1, library.llama_state_seq_get_size_ext(context, slot, flags)))
            moved = library.llama_state_seq_get_data_ext(context, data, len(data), slot, flags)
        return data.raw[:moved]


def _ends(positions: tuple[int, ...]) -> tuple[int, int]:
    return positions[0], positions[-1]


def _content(kept: Kept) -> bytes:
    """The bytes of a state that was taken, without what a file has before them."""
    if kept.file is None:
        assert kept.data is not None
        return kept.data.raw
    data = os.pread(kept.file, os.fstat(kept.file).st_size, 0)
    tokens = int.from_bytes(data[8:_FILE_HEADER], "little")
    return data[_FILE_HEADER + 4 * tokens :]
