"""A recording becomes a case: the calls on the context that decoded most, as steps, and notes on what is left out.

A state that is set is known again by its content, so a restore refers to the checkpoint it came from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET

from isolate.case import (
    Checkpoint,
    Clear,
    Decode,
    Flag,
    Load,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)
from isolate.errors import TraceError
from isolate.serve.recording import Call, Kind, Recording, Token
from isolate.steps import ends_after

#: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY and _ON_DEVICE of llama.h
_FLAGS: tuple[tuple[int, Flag], ...] = ((1, "partial_only"), (2, "on_device"))
_PROCESS, _ENCODE = 2, 1
_SEQUENCE_SIZE = "llama_state_seq_get_size"
_IN_MEMORY = (Kind.SEQ_RM, Kind.SEQ_CP, Kind.SEQ_KEEP, Kind.SEQ_ADD, Kind.CLEAR)


@dataclass
class Recorded:
    """What a recording comes to."""

    steps: list[Step]
    #: path of the model's file
    model: str
    #: path of the libllama that was called
    library: str
    #: llama_context_params as they were passed, and more bytes behind them
    params: bytes
    #: as the context itself says
    context_size: int
    api: Literal["llama_decode", "llama_process"]
    notes: list[str]
    #: the last step did not come back
    unfinished: bool
    #: bytes of each state that was taken, by step
    sizes: dict[int, int] = field(default_factory=dict)


def steps_of(recording: Recording) -> Recorded:
    """The steps of a recording. TraceError when no context was made in it."""
    context, calls = _chosen(recording)
    writer = _Writer()
    for call in calls:
        writer.add(call)
    model = _model_of(recording, context)
    library = recording.first(Kind.LIBRARY)
    others = sum(call.kind == Kind.CONTEXT for call in recording.calls) - 1
    if others:
        writer.note(f"{others} other context{'s' if others > 1 else ''} of the program left out")
    return Recorded(
        writer.steps,
        model.text() if model else "",
        library.text() if library else "",
        context.data,
        context.hash,
        "llama_process" if writer.functions[_PROCESS] else "llama_decode",
        [f"{what} ({count} times)" if count > 1 else what for what, count in writer.notes.items()],
        writer.unfinished,
        writer.sizes,
    )


def _model_of(recording: Recording, context: Call) -> Call | None:
    """The call that loaded the context's model: the last before it, for a model may lie where one that was freed did."""
    found = None
    for call in recording.calls:
        if call is context:
            break
        if (call.kind, call.process, call.result) == (Kind.MODEL, context.process, context.a[0]):
            found = call
    return found


def _chosen(recording: Recording) -> tuple[Call, list[Call]]:
    """The context that decoded most, and the calls on it in its lifetime."""
    living: dict[tuple[int, int], int] = {}
    memories: dict[tuple[int, int], int] = {}
    contexts: list[Call] = []
    calls: list[list[Call]] = []
    for call in recording.calls:
        at = (call.process, call.a[0])
        if call.kind == Kind.CONTEXT:
            contexts.append(call)
            calls.append([])
            if call.result:
                living[call.process, call.result] = len(contexts) - 1
        elif call.kind == Kind.MEMORY:
            if (call.process, call.a[1]) in living:
                memories[at] = living[call.process, call.a[1]]
        elif call.kind == Kind.FREE:
            living.pop(at, None)
        elif call.kind in _IN_MEMORY:
            if at in memories:
                calls[memories[at]].append(call)
        elif call.kind not in (Kind.OPENED, Kind.MODEL, Kind.LIBRARY) and at in living:
            calls[living[at]].append(call)
    if not contexts:
        raise TraceError("the program made no context: there is nothing to replay")
    best = max(range(len(contexts)), key=lambda i: sum(call.kind == Kind.DECODE for call in calls[i]))
    return contexts[best], calls[best]


class _Writer:
    """Makes steps of calls, one after the other."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.notes: Counter[str] = Counter()
        self.functions: Counter[int] = Counter()
        self.unfinished = False
        self.sizes: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.states: dict[int, Checkpoint | Save] = {}
        self.files: dict[str, Save] = {}
        self.kept: dict[str, int] = {}

    def note(self, what: str) -> None:
        """What is said once, with how often."""
        self.notes[what] += 1

    def add(self, call: Call) -> None:
        """The step of a call, if it has one."""
        step = self._step(call)
        self.unfinished = call.result is None
        if step is None:
            return
        if not isinstance(step, Decode):
            self.ends = ends_after(self.ends, step)
        self.steps.append(step)

    def _step(self, call: Call) -> Step | None:
        a = call.a
        match call.kind:
            case Kind.DECODE:
                return self._decode(call)
            case Kind.STATE_GET:
                return self._taken(call)
            case Kind.STATE_SET:
                return self._set(call)
            case Kind.FILE_SAVE:
                step = Save(a[1], self._name("file", a[1]), via="file")
                self.files[call.text()] = step
                self.kept[step.name] = self.ends.get(a[1], 0)
                return step
            case Kind.FILE_LOAD:
                return self._load_file(call)
            case Kind.SEQ_RM:
                return SeqRm(max(a[1], -1), max(a[2], -1), max(a[3], -1), returns=False if call.result == 0 else UNSET)
            case Kind.SEQ_CP:
                return SeqCp(a[1], a[2], max(a[3], -1), max(a[4], -1))
            case Kind.SEQ_KEEP:
                return SeqKeep(a[1])
            case Kind.SEQ_ADD:
                return SeqAdd(a[1], a[4], max(a[2], -1), max(a[3], -1))
            case Kind.CLEAR:
                return Clear(bool(a[1]))
            case _ if call.text() == _SEQUENCE_SIZE:
                # The step of a state asks for its size first.
                return self._taken(call) if call.result is None else None
            case _:
                self.note(f"{call.text()} left out: a case has no step for it")
                return None

    def _name(self, what: str, slot: int) -> str:
        return f"{len(self.steps)}-{what}-{slot}-at-{self.ends.get(slot, 0)}"

    # -- decode

    def _decode(self, call: Call) -> Decode | None:
        function = call.a[1]
        tokens = call.tokens()
        if function == _ENCODE or not tokens or any(token.token < 0 for token in tokens):
            self.note("a batch of embeddings, of an encoder, or without tokens left out")
            return None
        if any(token.sequences != 1 for token in tokens):
            self.note("tokens that belong to several sequences are given to the first of them")
        self.functions[function] += 1
        ends = dict(self.ends)
        batch = [self._run(part, ends) for part in _parts(tokens)]
        if call.result == 0 or call.result is None:
            self.ends = ends
        # 1 asks for a smaller batch, which a server then gives; anything else is a fault when it is replayed, too.
        return Decode(batch, returns=1 if call.result == 1 else UNSET)

    def _run(self, part: list[Token], ends: dict[int, int]) -> Run:
        slot, first = part[0].slot, part[0].position
        end = ends.get(slot, 0)
        start = end if first < 0 else first
        ends[slot] = start + len(part)
        wanted = [i for i, token in enumerate(part) if token.output == 1]
        logits: Any = wanted
        if len(wanted) == len(part) > 1:
            logits = "all"
        elif wanted == [len(part) - 1] or part[-1].output < 0:
            logits = "last"
        elif not wanted:
            logits = "none"
        return Run(slot, [token.token for token in part], logits, UNSET if start == end else start)

    # -- states

    def _taken(self, call: Call) -> Step:
        slot, flags = call.a[1], _flags(call.a[2])
        refused = 0 if call.result == 0 else UNSET
        step: Checkpoint | Save
        if flags:
            step = Checkpoint(slot, self._name("checkpoint", slot), flags, returns=refused)
        else:
            step = Save(slot, self._name("state", slot), returns=refused)
        if call.result:
            self.states[call.hash] = step
            self.kept[step.name] = self.ends.get(slot, 0)
            self.sizes[len(self.steps)] = call.result
        return step

    def _set(self, call: Call) -> Step | None:
        slot, flags = call.a[1], _flags(call.a[2])
        taken = self.states.get(call.a[4])
        if taken is None:
            self.note("a state that was not taken in this recording is not set: what follows may differ")
            return None
        refused = 0 if call.result == 0 else UNSET
        if call.result:
            self.ends[slot] = self.kept[taken.name]
        to = UNSET if slot == taken.slot else slot
        if isinstance(taken, Save):
            if flags:
                self.note("a whole state is set with other flags than it was taken with; the case has none")
            return Load(taken.name, to, returns=refused)
        return Restore(taken.name, to, UNSET if flags == taken.flags else flags, returns=refused)

    def _load_file(self, call: Call) -> Step | None:
        saved = self.files.get(call.text())
        if saved is None:
            self.note("a state from a file that was not written in this recording is not set: what follows may differ")
            return None
        self.ends[call.a[1]] = self.kept[saved.name]
        return Load(saved.name, call.a[1], returns=0 if call.result == 0 else UNSET)


def _flags(value: int) -> list[Flag]:
    return [name for bit, name in _FLAGS if value & bit]


def _parts(tokens: list[Token]) -> list[list[Token]]:
    """The batch in runs: the same slot, one position after the other."""
    found: list[list[Token]] = []
    for token in tokens:
        before = found[-1][-1] if found else None
        follows = before is not None and before.slot == token.slot
        if follows and before is not None and token.position in (before.position + 1, -1):
            found[-1].append(token)
        else:
            found.append([token])
    return found
