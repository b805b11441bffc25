"""A case as the plain calls a program makes: positions worked out, states numbered. What the C++ and Python reproducers print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
)
from isolate.errors import IsolateError
from isolate.fault import Fault
from isolate.steps import ends_after

#: Checks that a program without isolate's oracles cannot make.
NEEDS_AN_ORACLE = ("positions", "cells", "logits")
FLAGS = {"partial_only": 1, "on_device": 2}


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
    """One step: the name of the function that does it in the printed program, and its arguments."""

    index: int
    name: str
    arguments: tuple[int | bool, ...] = ()
    batch: tuple[Tokens, ...] = ()
    settings: dict[str, int | float | bool | str] | None = None


def calls(case: Case, fault: Fault) -> Iterator[Call]:
    """The steps up to the one that fails. IsolateError for a fault that only an oracle can see, and for llama_batch_ext."""
    if fault.kind in NEEDS_AN_ORACLE:
        raise IsolateError(
            f"a fault of kind {fault.kind} is seen by an oracle, not by the calls: export it as pytest, html or issue"
        )
    if case.api != "llama_decode":
        raise IsolateError(
            "this case decodes through llama_process, which no released llama.h declares: export it as pytest"
        )
    last = len(case.steps) if fault.step.index is None else fault.step.index + 1
    ends: dict[int, int] = {}
    #: name -> number, slot, flags, end
    kept: dict[str, tuple[int, int, int, int]] = {}
    for index, step in enumerate(case.steps[:last]):
        match step:
            case Decode():
                batch = []
                after = dict(ends)
                for run in step.batch:
                    start = run.at if isinstance(run.at, int) else after.get(run.slot, 0)
                    after[run.slot] = start + run.count()
                    pattern = run.tokens if isinstance(run.tokens, Pattern) else None
                    numbers = (pattern.first, pattern.stride, pattern.modulo) if pattern else None
                    explicit = tuple(run.tokens) if isinstance(run.tokens, list) else None
                    batch.append(Tokens(run.slot, start, run.count(), explicit, numbers, tuple(run.outputs())))
                code = 0 if step.returns is UNSET else int(step.returns)
                ends = after if code == 0 else ends
                yield Call(index, "decode", (code,), tuple(batch))
            case Checkpoint() | Save():
                flags = sum(FLAGS[flag] for flag in set(step.flags)) if isinstance(step, Checkpoint) else 0
                number = kept[step.name][0] if step.name in kept else len(kept)
                kept[step.name] = number, step.slot, flags, ends.get(step.slot, 0)
                file = isinstance(step, Save) and step.via == "file"
                if file:
                    raise IsolateError(
                        "this case saves a state to a file: export it as pytest, or change `via` to memory"
                    )
                yield Call(
                    index, "take", (number, step.slot, flags, -1 if step.returns is UNSET else int(step.returns))
                )
            case Restore() | Load():
                number, taken, flags, end = kept[step.name]
                if isinstance(step, Restore) and isinstance(step.flags, list):
                    flags = sum(FLAGS[flag] for flag in set(step.flags))
                slot = step.slot if isinstance(step.slot, int) else taken
                wanted = -1 if step.returns is UNSET else int(step.returns)
                ends = ends if wanted == 0 else {**ends, slot: end}
                how = step.damage
                cut = how.cut if how is not UNSET and isinstance(how.cut, int) else -1
                byte = how.byte if how is not UNSET and isinstance(how.byte, int) else -1
                xor = how.xor if how is not UNSET else 0
                yield Call(index, "set", (number, slot, flags, wanted, cut, byte, xor))
            case Reopen():
                ends = {}
                yield Call(index, "open", settings=step.context.settings())
            case SeqRm():
                answer = True if step.returns is UNSET else bool(step.returns)
                ends = ends_after(ends, step) if answer else ends
                yield Call(index, "seq_rm", (step.slot, step.p0, step.p1, answer))
            case SeqCp():
                ends = ends_after(ends, step)
                yield Call(index, "seq_cp", (step.slot, step.into, step.p0, step.p1))
            case SeqAdd():
                ends = ends_after(ends, step)
                yield Call(index, "seq_add", (step.slot, step.p0, step.p1, step.delta))
            case SeqKeep():
                ends = ends_after(ends, step)
                yield Call(index, "seq_keep", (step.slot,))
            case Clear():
                ends = {}
                yield Call(index, "clear", (step.data,))


def model_file(case: Case) -> tuple[str, str | None]:
    """How a reproducer names the model file, and the command that writes it where it is one of the zoo."""
    model = case.model
    if not isinstance(model.zoo, str):
        return "model.gguf", None
    kind = model.type if isinstance(model.type, str) else "F32"
    seed = f" --seed {model.seed}" if isinstance(model.seed, int) else ""
    name = f"{model.zoo}-{kind}.gguf"
    return name, f"isolate model {model.zoo} --type {kind}{seed} --out {name}"
