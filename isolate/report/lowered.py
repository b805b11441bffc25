"""A case as the plain calls a program makes: positions worked out, states numbered. What the C++ and Python reproducers print.

A fault that an oracle saw ends with the oracle's comparison, its numbers taken from the fault's evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from isolate.case import (
    Case,
    Checkpoint,
    Clear,
    Decode,
    Load,
    Pattern,
    Reopen,
    Restore,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)
from isolate.errors import IsolateError
from isolate.fault import Fault, Finding
from isolate.replay import again
from isolate.steps import JUDGED_BY, ends_after

FLAGS = {"partial_only": 1, "on_device": 2}
Settings = dict[str, int | float | bool | str]


@dataclass(frozen=True)
class Tokens:
    """A run of tokens: `explicit`, or first, stride and modulo of `count` of them; both empty for the greedy token."""

    slot: int
    start: int
    count: int
    explicit: tuple[int, ...] | None
    pattern: tuple[int, int, int] | None
    #: indices into the run of the tokens that get logits
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A call of a function of the printed program, or of the library (`llama_...`), with what it is given."""

    name: str
    arguments: tuple[int | bool | float, ...] = ()
    batch: tuple[Tokens, ...] = ()
    settings: Settings | None = None


@dataclass(frozen=True)
class _State:
    """A state that was taken; `copy` is the number of another one of the same, in memory, where it is in a file."""

    number: int
    copy: int
    slot: int
    flags: int
    #: position after the slot's last token
    end: int
    file: bool


def calls(case: Case, fault: Fault) -> Iterator[Call]:
    """The steps up to the one that fails, then what shows that it did. IsolateError where a program cannot show it."""
    if fault.kind == "engine":
        raise IsolateError("isolate itself failed: there is no fault of the library that a program could show")
    if JUDGED_BY.get(fault.kind) == "counters":
        raise IsolateError("what a run uses is counted beside it, not by the program itself: export it as pytest")
    if fault.step.kind == "check":
        raise IsolateError("the library died in a comparison that an oracle made, not in a step: export it as pytest")
    steps = case.steps
    if fault.step.index is not None:
        steps = steps[: fault.step.index + 1]
    elif fault.step.kind != "close":
        steps = []
    yield Call("open", settings=case.context.settings())
    lowering = _Lowering(case, also_in_memory=fault.kind == "cells")
    for index, step in enumerate(steps):
        yield from lowering.step(index, step)
    if fault.step.kind == "close":
        yield Call("close")
    yield from lowering.check(len(steps) - 1, fault)


class _Lowering:
    """What is known of slots, states and settings while the steps are gone through."""

    def __init__(self, case: Case, also_in_memory: bool) -> None:
        self.api = case.api
        self.context = case.context
        self.also_in_memory = also_in_memory
        self.ends: dict[int, int] = {}
        self.states: dict[str, _State] = {}
        self.numbers = 0
        self.last: Step | None = None

    def step(self, index: int, step: Step) -> Iterator[Call]:
        self.last = step
        match step:
            case Decode():
                yield self.decode(index, step)
            case Checkpoint() | Save():
                yield from self.take(index, step)
            case Restore() | Load():
                yield self.set(index, step)
            case Reopen():
                self.ends, self.context = {}, step.context
                yield Call("open", settings=step.context.settings())
            case SeqRm():
                answer = True if step.returns is UNSET else bool(step.returns)
                self.ends = ends_after(self.ends, step) if answer else self.ends
                yield Call("seq_rm", (index, step.slot, step.p0, step.p1, answer))
            case _:
                self.ends = ends_after(self.ends, step)
                yield Call(f"llama_memory_{step.kind}", _numbers(step))

    def decode(self, index: int, step: Decode) -> Call:
        batch = []
        after = dict(self.ends)
        for run in step.batch:
            start = run.at if isinstance(run.at, int) else after.get(run.slot, 0)
            after[run.slot] = start + run.count()
            pattern = run.tokens if isinstance(run.tokens, Pattern) else None
            numbers = (pattern.first, pattern.stride, pattern.modulo) if pattern else None
            explicit = tuple(run.tokens) if isinstance(run.tokens, list) else None
            batch.append(Tokens(run.slot, start, run.count(), explicit, numbers, tuple(run.outputs())))
        code = 0 if step.returns is UNSET else int(step.returns)
        self.ends = after if code == 0 else self.ends
        return Call("decode", (index, code), tuple(batch))

    def take(self, index: int, step: Checkpoint | Save) -> Iterator[Call]:
        flags = sum(FLAGS[flag] for flag in set(step.flags)) if isinstance(step, Checkpoint) else 0
        file = isinstance(step, Save) and step.via == "file"
        number = self.number()
        copy = self.number() if file and self.also_in_memory else number
        self.states[step.name] = _State(number, copy, step.slot, flags, self.ends.get(step.slot, 0), file)
        wanted = -1 if step.returns is UNSET else int(step.returns)
        if file:
            yield Call("take_file", (index, number, step.slot, wanted))
        if copy != number or not file:
            yield Call("take", (index, copy, step.slot, flags, wanted))

    def number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def set(self, index: int, step: Restore | Load) -> Call:
        state = self.states[step.name]
        flags = state.flags
        if isinstance(step, Restore) and isinstance(step.flags, list):
            flags = sum(FLAGS[flag] for flag in set(step.flags))
        slot = step.slot if isinstance(step.slot, int) else state.slot
        wanted = -1 if step.returns is UNSET else int(step.returns)
        self.ends = self.ends if wanted == 0 else {**self.ends, slot: state.end}
        how = step.damage
        cut = how.cut if how is not UNSET and isinstance(how.cut, int) else -1
        byte = how.byte if how is not UNSET and isinstance(how.byte, int) else -1
        damage = cut, byte, how.xor if how is not UNSET else 0
        if state.file:
            return Call("set_file", (index, state.number, slot, wanted, *damage))
        return Call("set", (index, state.number, slot, flags, wanted, *damage))

    def check(self, index: int, fault: Fault) -> Iterator[Call]:
        """What the oracle compared after the step that failed."""
        if fault.kind == "nan":
            yield Call("check_finite", (index,))
        elif fault.kind == "positions":
            held = again.held(fault)
            yield Call("check_positions", (index, held.slot, *held.oldest, *held.newest, held.or_none))
        elif fault.kind == "logits":
            yield from self.check_logits(index, again.alone(fault))
        elif fault.kind == "cells" and isinstance(self.last, Checkpoint | Save | Restore | Load):
            yield self.check_cells(index, self.last)

    def check_logits(self, index: int, alone: again.Alone) -> Iterator[Call]:
        yield Call("alone_open", settings=self.context.for_one_slot(alone.cells))
        acts = alone.acts or []
        for act in acts:
            match act:
                case again.Decoded():
                    explicit = tuple(act.tokens)
                    position = alone.position if act is acts[-1] else -1
                    tokens = Tokens(0, act.start, len(explicit), explicit, None, ())
                    yield Call("alone_decode", (act.start, position), (tokens,))
                case again.Removed():
                    yield Call("alone_rm", (act.p0, act.p1))
                case again.Moved():
                    yield Call("alone_add", (act.p0, act.p1, act.delta))
        yield Call("check_logits", (index, alone.slot, alone.position, alone.limit))

    def check_cells(self, index: int, step: Checkpoint | Save | Restore | Load) -> Call:
        state = self.states[step.name]
        if isinstance(step, Checkpoint | Save):
            settings = self.context.settings()
            return Call("check_saved", (index, state.copy, state.slot, state.flags), settings=settings)
        slot = step.slot if isinstance(step.slot, int) else state.slot
        return Call("check_cells", (index, state.copy, state.slot, slot, state.flags))


def _numbers(step: Any) -> tuple[int | bool, ...]:
    match step:
        case SeqCp():
            return step.slot, step.into, step.p0, step.p1
        case SeqAdd():
            return step.slot, step.p0, step.p1, step.delta
        case SeqKeep():
            return (step.slot,)
        case Clear():
            return (step.data,)
    raise AssertionError(step.kind)


def on_a_gpu(finding: Finding) -> bool:
    """The fault was found with the model's layers on a GPU, real or simulated."""
    return finding.fault.kind == "cuda" or "--target cuda" in finding.replay or "--target dry" in finding.replay


def model_file(case: Case) -> tuple[str, str | None]:
    """How a reproducer names the model file, and the command that writes it where it is one of the zoo."""
    model = case.model
    if not isinstance(model.zoo, str):
        return "model.gguf", None
    kind = model.type if isinstance(model.type, str) else "F32"
    seed = f" --seed {model.seed}" if isinstance(model.seed, int) else ""
    less = "".join(
        f" --{what} {count}"
        for what, count in (("layers", model.layers), ("experts", model.experts))
        if isinstance(count, int)
    )
    name = f"{model.zoo}-{kind}.gguf"
    return name, f"isolate model {model.zoo} --type {kind}{seed}{less} --out {name}"
