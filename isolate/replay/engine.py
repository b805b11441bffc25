"""Steps to library calls, in the child.

The engine keeps one model and one context and does to them what the case says, one step after the other. Before each
step it says so in the trace, so that the parent knows what was in flight when the child does not come back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from isolate.case import (
    MAX_POSITION,
    Case,
    Checkpoint,
    Clear,
    Context,
    Damage,
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
    Step,
)
from isolate.errors import BuildError, CaseError, ModelError
from isolate.fault import Call, Fault, Signature, StepInFlight
from isolate.library.bind import Library
from isolate.replay.batch import Batch, Fed, Tokens, floats
from isolate.replay.loaded import Models
from isolate.steps import ends_after
from isolate.trace.ring import Writer

#: What llama_decode's answers mean (llama.h).
DECODE_CODES = {
    0: "success",
    1: "no KV slot was found for the batch",
    2: "the computation was aborted",
    -1: "the batch is invalid",
    -2: "memory could not be allocated, or a computation failed",
    -3: "the computation failed",
}


@dataclass
class Row:
    """One row of logits that a decode gave."""

    slot: int
    position: int
    #: place in the batch, the argument of llama_get_logits_ith
    index: int


@dataclass
class Result:
    """What a step did, for the oracles: the runs it decoded and the rows of logits they gave."""

    #: 1 for success; a decode's code, or the bytes a state call moved
    code: int
    fed: list[Fed] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    #: slot that a state went to, where a state was set
    slot: int | None = None


@dataclass
class Kept:
    """A state that was taken: its bytes, or the file that holds them."""

    slot: int
    flags: int
    #: position after the slot's last token when it was taken
    end: int
    data: ctypes.Array[ctypes.c_char] | None
    file: int | None = None

    def close(self) -> None:
        """Give the file back, where there is one."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class StepFailed(Exception):
    """A step did not answer as it should; carries the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault.signature))
        self.fault = fault


class Engine:
    """One case on one context. Use `steps()` to run it, `close()` when done."""

    def __init__(self, library: Library, writer: Writer, models: Models, case: Case, eval_callback: Any = None) -> None:
        self.library = library
        self.writer = writer
        self.models = models
        self.case = case
        self.eval_callback = eval_callback
        self.batch = Batch(library)
        self.kept: dict[str, Kept] = {}
        self.ends: dict[int, int] = {}
        self.greedy: dict[int, int] = {}
        self.context: int | None = None
        self.in_flight = StepInFlight(None, "context")

    def open(self, settings: Context | None = None) -> None:
        """Make the context. ModelError when the library answers NULL."""
        assert self.models.handle is not None
        wanted = settings or self.case.context
        params = self.library.context_params()
        self.library.set_params(params, wanted.settings(), "context")
        if self.eval_callback is not None:
            self.library.set_params(params, {"cb_eval": self.eval_callback}, "context")
        self.close()
        self.context = self._call("llama_init_from_model", self.models.handle, params)
        if not self.context:
            raise ModelError(
                f"the build made no context with n_ctx {wanted.n_ctx}, n_seq_max {wanted.n_seq_max}, "
                f"type_k {wanted.type_k}, type_v {wanted.type_v}, flash_attn_type {wanted.flash_attn_type}: "
                "choose settings that this model and machine allow"
            )
        self.library.check_context(self.context, params)
        self.settings = wanted
        self.memory = self.library.llama_get_memory(self.context)
        self.ends.clear()
        self.greedy.clear()

    def close(self) -> None:
        """Free the context; the kept states stay."""
        if self.context:
            self.library.llama_free(self.context)
            self.context = None

    def forget(self) -> None:
        """Give the kept states back."""
        for kept in self.kept.values():
            kept.close()
        self.kept.clear()

    def steps(self) -> Iterator[tuple[int, Step, Result]]:
        """Run the case, giving each step's result. StepFailed ends it."""
        for index, step in enumerate(self.case.steps):
            self.in_flight = StepInFlight(index, step.kind, step.tokens_by_slot())
            record = self.writer.step_begin(index, step.kind)
            result = self._do(index, step)
            self.writer.step_end(record, result.code)
            yield index, step, result

    def _do(self, index: int, step: Step) -> Result:
        match step:
            case Decode():
                return self._decode(index, step)
            case Checkpoint():
                return self._take(step, self._flags(step.flags))
            case Save():
                return self._take(step, 0)
            case Restore() | Load():
                return self._set(step)
            case Reopen():
                self.open(step.context)
                return Result(1)
            case _:
                return self._memory(step)

    def _call(self, routine: str, *arguments: Any) -> Any:
        """Call the library; the trace says which call it is in, should the child not come back."""
        self.writer.routine(routine)
        return getattr(self.library, routine)(*arguments)

    # -- decode

    def _decode(self, index: int, step: Decode) -> Result:
        result = Result(0)
        outputs = [run.outputs() for run in step.batch]
        ends = dict(self.ends)
        place = 0
        for number, (run, wanted) in enumerate(zip(step.batch, outputs, strict=True)):
            tokens = self._tokens(index, number, run)
            start = ends.get(run.slot, 0) if isinstance(run.at, msgspec.UnsetType) else run.at
            if start + len(tokens) > MAX_POSITION:
                raise CaseError(
                    f"step {index}, field `batch[{number}]`: the run would end beyond position {MAX_POSITION}"
                )
            ends[run.slot] = start + len(tokens)
            result.fed.append(Fed(run.slot, tokens, start))
            result.rows += [Row(run.slot, start + i, place + i) for i in wanted]
            place += len(tokens)
        self.batch.fill(result.fed, outputs)
        if self.case.api == "llama_decode":
            result.code = self._call("llama_decode", self.context, self.batch.structure)
        else:
            result.code = self._process(result, outputs)
        if result.code == 0:
            # The computation may still be running on a GPU: a fault there belongs to this step.
            self._call("llama_synchronize", self.context)
            self.ends = ends
        wanted_code = 0 if isinstance(step.returns, msgspec.UnsetType) else int(step.returns)
        if result.code != wanted_code:
            meaning = DECODE_CODES.get(result.code, "a fatal error" if result.code < 0 else "unknown")
            self._fail("decode", self.case.api, result.code, f"returned {result.code}: {meaning}", step)
        if result.code != 0:
            result.rows = []
        self._remember_greedy(result)
        return result

    def _tokens(self, index: int, number: int, run: Run) -> Tokens:
        if isinstance(run.tokens, Pattern):
            pattern = run.tokens
            steps = pattern.first + pattern.stride * np.arange(pattern.count, dtype=np.int64)
            tokens = (steps % pattern.modulo).astype(np.int32)
        elif isinstance(run.tokens, str):
            if run.slot not in self.greedy:
                raise CaseError(
                    f"step {index}, field `batch[{number}].tokens`: slot {run.slot} has no logits to take a greedy token from"
                )
            tokens = np.array([self.greedy[run.slot]], np.int32)
        else:
            tokens = np.array(run.tokens, np.int32)
        top = self.models.vocabulary
        if tokens.size and int(tokens.max()) >= top and not self.case.hostile:
            raise CaseError(
                f"step {index}, field `batch[{number}].tokens`: token {tokens.max()} is outside the model's vocabulary of "
                f"{top} tokens"
            )
        return tokens

    def _process(self, result: Result, outputs: list[list[int]]) -> int:
        """Decode through llama_batch_ext, as newer servers do."""
        call = self.library
        extended = call.llama_batch_ext_init(self.context)
        try:
            for run, wanted in zip(result.fed, outputs, strict=True):
                chosen = set(wanted)
                for offset, token in enumerate(run.tokens.tolist()):
                    place = call.llama_batch_ext_add_token(extended, run.slot, token)
                    if place < 0:
                        self._fail("decode", "llama_batch_ext_add_token", place, f"returned {place}", None)
                    position = ctypes.c_int32(run.start + offset)
                    call.llama_batch_ext_set_pos(extended, place, ctypes.byref(position))
                    if offset in chosen:
                        call.llama_batch_ext_set_output_logits(extended, place, True)
            return int(self._call("llama_process", self.context, 1, extended))  # LLAMA_PROCESS_TYPE_DECODE
        finally:
            call.llama_batch_ext_free(extended)

    def logits(self, row: Row) -> npt.NDArray[np.float32] | None:
        """A row of the last decode's logits, one float a token of the vocabulary; a view, valid until the next decode."""
        address = self.library.llama_get_logits_ith(self.context, row.index)
        if not address:
            return None
        return floats(address, self.models.vocabulary)

    def _remember_greedy(self, result: Result) -> None:
        if not self._asks_greedy():
            return
        for row in result.rows:
            logits = self.logits(row)
            if logits is not None:
                self.greedy[row.slot] = int(logits.argmax())

    def _asks_greedy(self) -> bool:
        if not hasattr(self, "_greedy_asked"):
            decodes = (step for step in self.case.steps if isinstance(step, Decode))
            self._greedy_asked = any(run.tokens == "greedy" for step in decodes for run in step.batch)
        return self._greedy_asked

    # -- states

    def _flags(self, names: list[Flag]) -> int:
        """LLAMA_STATE_SEQ_FLAGS_* by name. A build that does not know one would ignore it without a word."""
        known = self.library.state_flags
        for name in names:
            if name not in known:
                raise BuildError(f"this build has no state flag {name}; it has {', '.join(known) or 'none'}")
        return sum(known[name] for name in set(names))

    def _take(self, step: Checkpoint | Save, flags: int) -> Result:
        if isinstance(step, Save) and step.via == "file":
            return self._take_file(step)
        call = self.library
        if flags == 0 and not call.has("llama_state_seq_get_data_ext"):
            size = self._call("llama_state_seq_get_size", self.context, step.slot)
            data = ctypes.create_string_buffer(max(size, 1))
            moved = self._call("llama_state_seq_get_data", self.context, data, size, step.slot)
        else:
            size = self._call("llama_state_seq_get_size_ext", self.context, step.slot, flags)
            data = ctypes.create_string_buffer(max(size, 1))
            moved = self._call("llama_state_seq_get_data_ext", self.context, data, size, step.slot, flags)
        self.kept[step.name] = Kept(step.slot, flags, self.ends.get(step.slot, 0), data)
        self._moved(step, "llama_state_seq_get_data_ext", moved, size)
        return Result(moved, slot=step.slot)

    def _take_file(self, step: Save) -> Result:
        # A file without a name: nothing is left behind, however the child ends.
        file = os.memfd_create("isolate-state")
        path = f"/proc/self/fd/{file}".encode()
        moved = self._call("llama_state_seq_save_file", self.context, path, step.slot, None, 0)
        if step.name in self.kept:
            self.kept[step.name].close()
        self.kept[step.name] = Kept(step.slot, 0, self.ends.get(step.slot, 0), None, file)
        self._moved(step, "llama_state_seq_save_file", moved, os.fstat(file).st_size)
        return Result(moved, slot=step.slot)

    def _set(self, step: Restore | Load) -> Result:
        call = self.library
        kept = self.kept[step.name]
        slot = kept.slot if isinstance(step.slot, msgspec.UnsetType) else step.slot
        flags = kept.flags
        if isinstance(step, Restore) and not isinstance(step.flags, msgspec.UnsetType):
            flags = self._flags(step.flags)
        if kept.file is not None:
            moved, size = self._set_file(step, kept.file, slot)
            return self._was_set(step, "llama_state_seq_load_file", moved, size, slot)
        assert kept.data is not None
        data: Any = kept.data
        size = len(data)
        if not isinstance(step.damage, msgspec.UnsetType):
            damaged = damage(bytes(data), step.damage)
            size = len(damaged)
            data = ctypes.create_string_buffer(damaged, max(size, 1))
        if flags == 0 and not call.has("llama_state_seq_set_data_ext"):
            moved = self._call("llama_state_seq_set_data", self.context, data, size, slot)
        else:
            moved = self._call("llama_state_seq_set_data_ext", self.context, data, size, slot, flags)
        return self._was_set(step, "llama_state_seq_set_data_ext", moved, size, slot)

    def _was_set(self, step: Restore | Load, routine: str, moved: int, size: int, slot: int) -> Result:
        self._moved(step, routine, moved, size)
        if moved:
            self.ends[slot] = self.kept[step.name].end
        return Result(moved, slot=slot)

    def _set_file(self, step: Restore | Load, file: int, slot: int) -> tuple[int, int]:
        size = os.fstat(file).st_size
        if not isinstance(step.damage, msgspec.UnsetType):
            content = damage(os.pread(file, size, 0), step.damage)
            file = os.memfd_create("isolate-state")
            os.write(file, content)
            size = len(content)
        count = ctypes.c_size_t()
        path = f"/proc/self/fd/{file}".encode()
        # With NULL for the tokens the call only reads how many there are (llama.h); the file holds none.
        tokens = (ctypes.c_int32 * 1)()
        moved = self._call("llama_state_seq_load_file", self.context, path, slot, tokens, 1, ctypes.byref(count))
        return moved, size

    def _moved(self, step: Step, routine: str, moved: int, size: int) -> None:
        """A state call should move as many bytes as the state has, or 0 where the case says it is refused."""
        refused = not isinstance(step.returns, msgspec.UnsetType)
        if (refused and moved == step.returns) or (not refused and moved == size and size > 0):
            return
        said = f"returned {moved}" + ("" if refused else f" for a state of {size} bytes")
        self._fail("state", routine, moved, said, step)

    # -- memory

    def _memory(self, step: Step) -> Result:
        if not self.memory:
            self._fail("memory", f"llama_memory_{step.kind}", None, "this model keeps no memory", step)
        answer = True
        match step:
            case SeqRm():
                answer = bool(self._call("llama_memory_seq_rm", self.memory, step.slot, step.p0, step.p1))
            case SeqCp():
                self._call("llama_memory_seq_cp", self.memory, step.slot, step.into, step.p0, step.p1)
            case SeqAdd():
                self._call("llama_memory_seq_add", self.memory, step.slot, step.p0, step.p1, step.delta)
            case SeqKeep():
                self._call("llama_memory_seq_keep", self.memory, step.slot)
            case Clear():
                self._call("llama_memory_clear", self.memory, step.data)
        wanted = True if isinstance(step.returns, msgspec.UnsetType) else bool(step.returns)
        if answer != wanted:
            said = f"returned {str(answer).lower()}"
            self._fail("memory", f"llama_memory_{step.kind}", int(answer), said, step)
        if answer:
            self.ends = ends_after(self.ends, step)
        return Result(int(answer))

    def _fail(self, kind: str, routine: str, code: int | None, said: str, step: Step | None) -> None:
        returns = step.returns if step is not None else msgspec.UNSET
        wanted = "" if isinstance(returns, msgspec.UnsetType) else f", not {str(returns).lower()}"
        call = Call(routine, code, said)
        signature = Signature(kind, routine, code, self.in_flight.kind)
        raise StepFailed(Fault(kind, signature, self.in_flight, call, call, f"{routine} {said}{wanted}"))


def damage(data: bytes, how: Damage) -> bytes:
    """A state's bytes after what a case does to them; a byte beyond the end changes nothing."""
    if not isinstance(how.cut, msgspec.UnsetType):
        return data[: how.cut]
    if isinstance(how.byte, msgspec.UnsetType) or how.byte >= len(data):
        return data
    changed = bytearray(data)
    changed[how.byte] ^= how.xor
    return bytes(changed)
