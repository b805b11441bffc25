"""The case file: a model, context settings and steps. Data, never code.

Reading is strict: every field is known, typed and bounded, every reference points at something that exists, and a bad
one is refused by file, step and field. Nothing is run, and nothing is allocated that a number in the file could abuse:
a long prompt stays in its compact form until the child decodes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from isolate.errors import CaseError
from isolate.fault import DEATHS, KINDS, Fault
from isolate.recipes import VOCABULARY, Recipe
from isolate.refusal import sentence
from isolate.steps import (
    CHECKS,
    JUDGED_BY,
    MAX_CONTEXT,
    MAX_POSITION,
    MAX_SEQUENCES,
    MAX_TOKENS,
    NEED_NO_RESULTS,
    Check,
    Checkpoint,
    Clear,
    Context,
    Damage,
    Decode,
    Flag,
    Load,
    Name,
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
    Text,
    Token,
)
from isolate.zoo import ZOO

__all__ = [
    "CHECKS",
    "JUDGED_BY",
    "MAX_CONTEXT",
    "MAX_FILE_BYTES",
    "MAX_POSITION",
    "MAX_SEQUENCES",
    "NEED_NO_RESULTS",
    "Case",
    "Check",
    "Checkpoint",
    "Clear",
    "Context",
    "Damage",
    "Decode",
    "Expect",
    "Flag",
    "Load",
    "Model",
    "Name",
    "Pattern",
    "Reopen",
    "Restore",
    "Run",
    "Save",
    "SeqAdd",
    "SeqCp",
    "SeqKeep",
    "SeqRm",
    "Step",
    "Text",
    "Token",
    "parse",
    "read",
    "with_model",
    "write_beside",
]

VERSION = 1
MAX_FILE_BYTES = 64 << 20


class Model(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which model: one of the zoo, which isolate writes itself (`isolate model`), or a GGUF file."""

    zoo: Name | UnsetType = UNSET
    #: type of a zoo model: F32, Q8_0, Q3_K, ...; F32 when left out
    type: Name | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    #: its first layers alone, where all are alike; its first experts alone
    layers: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET
    experts: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET
    #: a relative path starts at the case file's folder
    file: Annotated[str, Meta(min_length=1, max_length=4096)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.zoo is UNSET) == (self.file is UNSET):
            raise ValueError("give either `zoo` (with `type` and `seed`) or `file`")
        if self.file is not UNSET and not (self.type is self.seed is self.layers is self.experts is UNSET):
            raise ValueError("`type`, `seed`, `layers` and `experts` go with `zoo`, not with `file`")
        if self.zoo is not UNSET and self.zoo not in ZOO:
            raise ValueError(f"no zoo model is called {self.zoo!r}; there are {', '.join(sorted(ZOO))}")
        if self.zoo is not UNSET:
            self.recipe()

    def recipe(self) -> Recipe:
        """What of the zoo it is. ValueError where it cannot have so few, or so many, layers or experts."""
        layers = self.layers if isinstance(self.layers, int) else None
        experts = self.experts if isinstance(self.experts, int) else None
        return ZOO[str(self.zoo)].smaller(layers, experts)

    def vocabulary(self) -> int | None:
        """Tokens in the vocabulary; None for a file, whose vocabulary the child knows."""
        return None if self.zoo is UNSET else VOCABULARY


#: Where a fault can be: in a step, while the model is loaded or the context made, in an oracle's own calls.
_PLACES = frozenset({str(step.__struct_config__.tag) for step in get_args(Step)} | {"load", "context", "check"})


class Expect(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fault a shipped case should give: its kind, the step's word, and a part of where it was."""

    kind: str
    step: str
    where: str = ""
    #: the targets that show it: `gpu` is cuda and dry:GPU; elsewhere the case passes
    on: Literal["any", "gpu"] = "any"
    #: the library reads what is not its own: the process dies in this step, and how it dies varies
    varies: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault is of kind {self.kind!r}; there are {', '.join(KINDS)}")
        if self.step not in _PLACES:
            raise ValueError(f"no fault is in {self.step!r}; there are {', '.join(sorted(_PLACES))}")
        if self.varies and self.kind not in DEATHS:
            raise ValueError(f"`varies` is for {', '.join(sorted(DEATHS))}, not for {self.kind}")

    def given_by(self, fault: Fault) -> bool:
        """The fault is this one."""
        if fault.step.kind != self.step:
            return False
        if self.varies:
            return fault.kind in DEATHS
        return fault.kind == self.kind and self.where in fault.signature.where


class Case(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A model, context settings, steps: everything that is needed to see a fault again."""

    isolate: Literal[1]
    model: Model
    steps: Annotated[list[Step], Meta(min_length=1, max_length=1 << 20)]
    about: Text = ""
    context: Context = Context()
    #: `llama_process` decodes through llama_batch_ext, where the build has it
    api: Literal["llama_decode", "llama_process"] = "llama_decode"
    #: oracles that this case needs to show what it shows
    check: list[Check] | Literal["all"] = []
    #: oversteps a documented limit on purpose: slots, tokens and batch sizes out of range are let through
    hostile: bool = False
    #: what a run of the release it was written for gives: a fault, or "pass"
    expect: Expect | Literal["pass"] = "pass"

    def __reduce__(self) -> tuple[Any, ...]:
        # A default is left out of the JSON where it is the very object: another process is given the case as JSON.
        return _decoded, (msgspec.json.encode(self),)

    def checks(self) -> tuple[Check, ...]:
        """The oracles that the case asks for."""
        return CHECKS if self.check == "all" else tuple(self.check)

    def as_json(self) -> dict[str, Any]:
        """Plain data, as it stands in a file."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    def write(self, path: Path) -> None:
        """Write it as a file that `read` takes."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def _decoded(data: bytes) -> Case:
    return msgspec.json.decode(data, type=Case)


def write_beside(case: Case, path: Path, folder: Path) -> None:
    """Write a case that was read in `folder` to another place: a relative model path still leads to its file."""
    if isinstance(case.model.file, str) and path.parent.absolute() != folder.absolute():
        case = msgspec.structs.replace(case, model=Model(file=str(folder.absolute() / case.model.file)))
    try:
        case.write(path)
    except OSError as error:
        raise CaseError(f"{path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> Case:
    """Read and check a case file. CaseError names the file, the step, the field and what is allowed."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CaseError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise CaseError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; write long prompts as a pattern of tokens")
    return parse(data, str(path))


def with_model(case: Case, model: str) -> Case:
    """The case with another model: `zoo:NAME`, `zoo:NAME:TYPE`, or a GGUF file's path. CaseError when there is none.

    A zoo model's vocabulary is small: token ids beyond it are folded into it.
    """
    try:
        if model.startswith("zoo:"):
            name, _, type_ = model[len("zoo:") :].partition(":")
            chosen = msgspec.convert({"zoo": name, **({"type": type_} if type_ else {})}, Model)
        else:
            chosen = Model(file=str(Path(model).absolute()))
    except ValueError as error:
        raise CaseError(f"--model {model}: {error}") from None
    changed = _folded(msgspec.structs.replace(case, model=chosen))
    _Reader(changed, f"--model {model}").check()
    return changed


def _folded(case: Case) -> Case:
    """Token ids of another model's vocabulary, taken modulo the size of this one's; the case then says so."""
    size = case.model.vocabulary()
    if size is None or case.hostile:
        return case

    def fold(run: Run) -> Run:
        if isinstance(run.tokens, Pattern):
            whole = run.tokens.largest() < size
            tokens: Any = run.tokens if whole else msgspec.structs.replace(run.tokens, modulo=size)
        else:
            tokens = run.tokens if isinstance(run.tokens, str) else [token % size for token in run.tokens]
        return run if tokens == run.tokens else msgspec.structs.replace(run, tokens=tokens)

    steps: list[Step] = [
        Decode([fold(run) for run in step.batch], returns=step.returns) if isinstance(step, Decode) else step
        for step in case.steps
    ]
    if steps == case.steps:
        return case
    said = f"Token ids are folded into the vocabulary of {size} tokens."
    return msgspec.structs.replace(case, steps=steps, about=f"{case.about}\n{said}".strip())


def parse(data: bytes, name: str) -> Case:
    """The case in `data`; `name` stands for the file in messages."""
    try:
        found = json.loads(data, object_pairs_hook=_without_repeats)
        if isinstance(found, dict) and str(found.get("schema")).startswith("isolate."):
            raise CaseError(
                f"{name}: what a command wrote with --json, not a case: `isolate export` and `isolate report` read it"
            )
        case = msgspec.json.decode(data, type=Case)
    except msgspec.ValidationError as error:
        raise CaseError(f"{name}: {sentence(error, data, Case)}") from None
    except _RepeatedField as error:
        raise CaseError(f"{name}: {error}") from None
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        table = "; a table goes to `isolate matrix`" if name.endswith(".toml") else ""
        raise CaseError(f"{name}: not JSON: {error}{table}") from None
    _Reader(case, name).check()
    return case


class _RepeatedField(Exception):
    """A field stands twice in one object: JSON leaves open which of them counts."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedField(f"field `{name[:64]}` stands twice in one object")
        found[name] = value
    return found


class _Reader:
    """Checks that go over more than one field: slots, names of states, tokens, batch sizes."""

    def __init__(self, case: Case, name: str) -> None:
        self.case = case
        self.name = name
        self.context = case.context
        self.checkpoints: dict[str, Checkpoint] = {}
        self.saved: dict[str, Save] = {}
        self.with_logits: set[int] = set()
        self.tokens = 0

    def fail(self, index: int, field: str, what: str) -> None:
        raise CaseError(f"{self.name}: step {index}, field `{field}`: {what}")

    def check(self) -> None:
        for index, step in enumerate(self.case.steps):
            if isinstance(step, Decode):
                self.decode(index, step)
            elif isinstance(step, Checkpoint | Save):
                self.slot(index, "slot", step.slot)
                (self.checkpoints if isinstance(step, Checkpoint) else self.saved)[step.name] = step  # type: ignore[assignment]
            elif isinstance(step, Restore):
                self.state(index, step, "checkpoint", self.checkpoints)
            elif isinstance(step, Load):
                self.state(index, step, "save", self.saved)
            elif isinstance(step, SeqRm):
                if step.slot != -1:
                    self.slot(index, "slot", step.slot)
            elif isinstance(step, SeqCp):
                self.slot(index, "slot", step.slot)
                self.slot(index, "into", step.into)
            elif isinstance(step, SeqAdd | SeqKeep):
                self.slot(index, "slot", step.slot)
            elif isinstance(step, Reopen):
                self.context = step.context
                self.with_logits.clear()

    def slot(self, index: int, field: str, slot: int) -> None:
        top = self.context.n_seq_max - 1
        if not 0 <= slot <= top and not self.case.hostile:
            self.fail(index, field, f"slot {slot} is outside 0 to {top} (n_seq_max is {top + 1})")

    def state(self, index: int, step: Restore | Load, maker: str, kept: dict[str, Any]) -> None:
        if step.name not in kept:
            there = ", ".join(sorted(kept)) or "none"
            self.fail(index, "name", f"no earlier `{maker}` step has the name {step.name!r} (so far: {there})")
        if step.slot is not UNSET:
            self.slot(index, "slot", step.slot)

    def decode(self, index: int, step: Decode) -> None:
        total = 0
        for number, run in enumerate(step.batch):
            field = f"batch[{number}]"
            self.slot(index, f"{field}.slot", run.slot)
            self.run_tokens(index, f"{field}.tokens", run)
            for output in run.outputs() if isinstance(run.logits, list) else ():
                if output >= run.count():
                    self.fail(index, f"{field}.logits", f"index {output} is outside the run of {run.count()} tokens")
            if not isinstance(run.at, UnsetType) and run.at + run.count() > MAX_POSITION:
                self.fail(index, f"{field}.at", f"the run would end beyond position {MAX_POSITION}")
            if run.wants_logits():
                self.with_logits.add(run.slot)
            total += run.count()
            if self.tokens + total > MAX_TOKENS:
                self.fail(index, "batch", f"the case decodes more than {MAX_TOKENS} tokens")
        self.tokens += total
        if self.case.hostile:
            return
        if total == 0:
            self.fail(index, "batch", "it holds no token")
        if total > self.context.n_batch:
            self.fail(index, "batch", f"{total} tokens are more than n_batch, {self.context.n_batch}")

    def run_tokens(self, index: int, field: str, run: Run) -> None:
        if run.tokens == "greedy":
            if run.slot not in self.with_logits:
                self.fail(index, field, f"slot {run.slot} has no logits yet to take a greedy token from")
            return
        if isinstance(run.tokens, Pattern):
            largest = run.tokens.largest()
        else:
            largest = max(run.tokens, default=0)
            if not run.tokens and not self.case.hostile:
                self.fail(index, field, "an empty run; leave the slot out instead")
        limit = self.case.model.vocabulary()
        if limit is not None and largest >= limit and not self.case.hostile:
            self.fail(index, field, f"token {largest} is outside the vocabulary of {limit} tokens")
