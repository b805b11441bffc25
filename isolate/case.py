"""The case file: a model, context settings and steps. Data, never code.

Reading is strict: every field is known, typed and bounded, every reference points at something that exists, and a bad
one is refused by file, step and field. Nothing is run, and nothing is allocated that a number in the file could abuse:
a long prompt stays in its compact form until the child decodes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from isolate.errors import CaseError
from isolate.fault import KINDS
from isolate.recipes import VOCABULARY
from isolate.refusal import sentence
from isolate.zoo import ZOO

VERSION = 1
MAX_FILE_BYTES = 64 << 20
MAX_CONTEXT = 1 << 24
MAX_SEQUENCES = 256
MAX_TOKENS = 1 << 24
#: of a token; the library counts in 32 bits
MAX_POSITION = 2**31 - 1 - (1 << 24)

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Position = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SlotId = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
Text = Annotated[str, Meta(max_length=1 << 16)]
Flag = Literal["partial_only", "on_device"]
Check = Literal["positions", "nan", "cells", "logits"]

#: The oracles that `--check` and a case's `check` can switch on.
CHECKS: tuple[Check, ...] = ("positions", "nan", "cells", "logits")
#: Those that look at what the library keeps of each slot, not at what was computed.
NEED_NO_RESULTS: frozenset[Check] = frozenset({"positions"})


class Pattern(Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens in compact form: token i is `(first + stride * i) mod modulo`."""

    count: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    modulo: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    first: Token = 0
    stride: Token = 1

    def largest(self) -> int:
        """An upper bound of its tokens, exact when the pattern is long enough to go round."""
        last = self.first + self.stride * (self.count - 1)
        return last if last < self.modulo else self.modulo - 1

    def tokens(self) -> list[int]:
        """The tokens, written out."""
        return [(self.first + self.stride * i) % self.modulo for i in range(self.count)]


class Run(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One slot's run of tokens in a batch."""

    slot: SlotId
    #: token ids, a Pattern, or "greedy": the one token that the slot's last logits put first
    tokens: list[Token] | Pattern | Literal["greedy"]
    #: which of the run's tokens get logits: indices into the run, or a word
    logits: Literal["last", "all", "none"] | list[Annotated[int, Meta(ge=0)]] = "last"
    #: position of the first token; left out: right after the slot's last one
    at: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET

    def count(self) -> int:
        """Tokens in the run."""
        if isinstance(self.tokens, Pattern):
            return self.tokens.count
        return 1 if self.tokens == "greedy" else len(self.tokens)

    def outputs(self) -> list[int]:
        """Indices into the run of the tokens that get logits."""
        if isinstance(self.logits, list):
            return self.logits
        count = self.count()
        return list(range(count)) if self.logits == "all" else [count - 1] if self.logits == "last" else []


class Damage(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is done to a saved state before it is set: cut to its first bytes, or one byte changed by exclusive or."""

    cut: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    byte: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    xor: Annotated[int, Meta(ge=1, le=255)] = 255

    def __post_init__(self) -> None:
        if (self.cut is UNSET) == (self.byte is UNSET):
            raise ValueError("give either `cut` or `byte`")


class _Step(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="step", kw_only=True):
    """What every step has: the answer it should get when that is not plain success."""

    #: decode: llama_decode's code; memory calls: true or false; state calls: 0 for a refusal
    returns: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | bool | UnsetType = UNSET

    @property
    def kind(self) -> str:
        """The step's word in the case file."""
        return str(self.__struct_config__.tag)

    def tokens_by_slot(self) -> dict[int, int]:
        """How many tokens it decodes, by slot."""
        return {}


class Decode(_Step, frozen=True, tag="decode"):
    """One batch: runs of tokens of one or several slots."""

    batch: Annotated[list[Run], Meta(max_length=1 << 16)]

    def tokens_by_slot(self) -> dict[int, int]:
        """How many tokens it decodes, by slot."""
        tokens: dict[int, int] = {}
        for run in self.batch:
            tokens[run.slot] = tokens.get(run.slot, 0) + run.count()
        return tokens


class Checkpoint(_Step, frozen=True, tag="checkpoint"):
    """llama_state_seq_get_data_ext: a context checkpoint of one slot, kept under a name."""

    slot: SlotId
    name: Name
    flags: list[Flag] = field(default_factory=lambda: list[Flag](["partial_only"]))


class Restore(_Step, frozen=True, tag="restore"):
    """llama_state_seq_set_data_ext: a checkpoint set back, into `slot` or the slot it came from."""

    name: Name
    slot: SlotId | UnsetType = UNSET
    #: left out: those it was taken with
    flags: list[Flag] | UnsetType = UNSET
    damage: Damage | UnsetType = UNSET


class Save(_Step, frozen=True, tag="save"):
    """llama_state_seq_get_data or _save_file: the whole state of one slot, kept under a name."""

    slot: SlotId
    name: Name
    via: Literal["memory", "file"] = "memory"


class Load(_Step, frozen=True, tag="load"):
    """llama_state_seq_set_data or _load_file: a saved state set, into `slot` or the slot it came from."""

    name: Name
    slot: SlotId | UnsetType = UNSET
    damage: Damage | UnsetType = UNSET


class SeqRm(_Step, frozen=True, tag="seq_rm"):
    """llama_memory_seq_rm: positions p0 to p1 (not included) of a slot; -1 is the beginning, the end, every slot."""

    slot: SlotId
    p0: Position = -1
    p1: Position = -1


class SeqCp(_Step, frozen=True, tag="seq_cp"):
    """llama_memory_seq_cp: positions p0 to p1 of `slot` also belong to `into`."""

    slot: SlotId
    into: SlotId
    p0: Position = -1
    p1: Position = -1


class SeqAdd(_Step, frozen=True, tag="seq_add"):
    """llama_memory_seq_add: positions p0 to p1 of a slot move by `delta`."""

    slot: SlotId
    delta: Int32
    p0: Position = -1
    p1: Position = -1


class SeqKeep(_Step, frozen=True, tag="seq_keep"):
    """llama_memory_seq_keep: everything but this slot is removed."""

    slot: SlotId


class Clear(_Step, frozen=True, tag="clear"):
    """llama_memory_clear: every slot is emptied; `data` also clears the buffers."""

    data: bool = True


class Context(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Context settings by their llama.h names. The defaults are the same for every build."""

    n_ctx: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] = 4096
    n_batch: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] = 2048
    n_ubatch: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] = 512
    n_seq_max: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] = 1
    n_threads: Annotated[int, Meta(ge=1, le=512)] = 1
    n_threads_batch: Annotated[int, Meta(ge=1, le=512)] = 1
    type_k: Name = "f16"
    type_v: Name = "f16"
    flash_attn_type: Literal["auto", "disabled", "enabled"] = "auto"
    kv_unified: bool = False
    swa_full: bool = True
    # The rest is set only when the case sets it.
    n_rs_seq: Annotated[int, Meta(ge=0, le=1 << 16)] | UnsetType = UNSET
    n_outputs_max: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | UnsetType = UNSET
    n_outputs_max_per_seq: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | UnsetType = UNSET
    pooling_type: Literal["none", "mean", "cls", "last", "rank"] | UnsetType = UNSET
    attention_type: Literal["causal", "non_causal"] | UnsetType = UNSET
    rope_scaling_type: Literal["none", "linear", "yarn", "longrope"] | UnsetType = UNSET
    rope_freq_base: float | UnsetType = UNSET
    rope_freq_scale: float | UnsetType = UNSET
    yarn_ext_factor: float | UnsetType = UNSET
    yarn_attn_factor: float | UnsetType = UNSET
    yarn_beta_fast: float | UnsetType = UNSET
    yarn_beta_slow: float | UnsetType = UNSET
    yarn_orig_ctx: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    defrag_thold: float | UnsetType = UNSET
    embeddings: bool | UnsetType = UNSET
    offload_kqv: bool | UnsetType = UNSET
    op_offload: bool | UnsetType = UNSET

    def settings(self) -> dict[str, int | float | bool | str]:
        """What is to be set, by the names of llama.h."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not UNSET}


class Reopen(_Step, frozen=True, tag="context"):
    """The context is freed and made again with these settings, as when a server restarts; saved states are kept.

    Not a call a running server makes, but the only way to say that a state goes to a context of another shape.
    """

    context: Context


Step = Decode | Checkpoint | Restore | Save | Load | SeqRm | SeqCp | SeqAdd | SeqKeep | Clear | Reopen


class Model(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which model: one of the zoo, which isolate writes itself (`isolate model`), or a GGUF file."""

    zoo: Name | UnsetType = UNSET
    #: type of a zoo model: F32, Q8_0, Q3_K, ...; F32 when left out
    type: Name | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    #: a relative path starts at the case file's folder
    file: Annotated[str, Meta(min_length=1, max_length=4096)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.zoo is UNSET) == (self.file is UNSET):
            raise ValueError("give either `zoo` (with `type` and `seed`) or `file`")
        if self.file is not UNSET and (self.type is not UNSET or self.seed is not UNSET):
            raise ValueError("`type` and `seed` go with `zoo`, not with `file`")
        if self.zoo is not UNSET and self.zoo not in ZOO:
            raise ValueError(f"no zoo model is called {self.zoo!r}; there are {', '.join(sorted(ZOO))}")

    def vocabulary(self) -> int | None:
        """Tokens in the vocabulary; None for a file, whose vocabulary the child knows."""
        return None if self.zoo is UNSET else VOCABULARY


class Expect(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fault a shipped case should give: its kind, the step's word, and a part of where it was."""

    kind: str
    step: str
    where: str = ""
    #: the targets that show it: `gpu` is cuda and dry:GPU; elsewhere the case passes
    on: Literal["any", "gpu"] = "any"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault is of kind {self.kind!r}; there are {', '.join(KINDS)}")


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
            chosen = Model(zoo=name, type=type_ or UNSET)
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
        json.loads(data, object_pairs_hook=_without_repeats)
        case = msgspec.json.decode(data, type=Case)
    except msgspec.ValidationError as error:
        raise CaseError(f"{name}: {sentence(error, data, Case)}") from None
    except _RepeatedField as error:
        raise CaseError(f"{name}: {error}") from None
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise CaseError(f"{name}: not JSON: {error}") from None
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
            if run.outputs():
                self.with_logits.add(run.slot)
            total += run.count()
        self.tokens += total
        if self.tokens > MAX_TOKENS:
            self.fail(index, "batch", f"the case decodes more than {MAX_TOKENS} tokens")
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
