"""The steps of a case: one struct a call that a server makes, with the settings of the context they are made on."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

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
Check = Literal["positions", "nan", "cells", "logits", "counters"]

#: The oracles that `--check` and a case's `check` can switch on.
CHECKS: tuple[Check, ...] = ("positions", "nan", "cells", "logits", "counters")
#: Those that look at what the library keeps and uses, not at what was computed.
NEED_NO_RESULTS: frozenset[Check] = frozenset({"positions", "counters"})
#: Kinds of fault that are the judgement of an oracle, and which one's.
JUDGED_BY: dict[str, Check] = {
    "positions": "positions",
    "nan": "nan",
    "cells": "cells",
    "logits": "logits",
    "leak": "counters",
    "slow": "counters",
}


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
        if count == 0 or self.logits == "none":
            return []
        return list(range(count)) if self.logits == "all" else [count - 1]

    def wants_logits(self) -> bool:
        """Some token of the run gets logits."""
        return self.logits != "none" and self.logits != [] and self.count() > 0


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


#: Settings that belong to the context under test only.
_OF_SEVERAL_SLOTS = ("n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq", "pooling_type", "embeddings")


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

    def for_one_slot(self, positions: int) -> dict[str, int | float | bool | str]:
        """The settings of a context with one slot of so many positions, to compare a slot of this one with."""
        values = {name: value for name, value in self.settings().items() if name not in _OF_SEVERAL_SLOTS}
        # the tail of a full-size window can be taken back
        return values | {"n_ctx": positions, "n_seq_max": 1, "swa_full": True}


class Reopen(_Step, frozen=True, tag="context"):
    """The context is freed and made again with these settings, as when a server restarts; saved states are kept.

    Not a call a running server makes, but the only way to say that a state goes to a context of another shape.
    """

    context: Context


Step = Decode | Checkpoint | Restore | Save | Load | SeqRm | SeqCp | SeqAdd | SeqKeep | Clear | Reopen


def ends_after(ends: dict[int, int], step: Step) -> dict[int, int]:
    """Where each slot's next token goes after a memory call, from where it went before."""
    match step:
        case Clear():
            return {}
        case SeqKeep():
            return {step.slot: ends.get(step.slot, 0)}
        case SeqRm():
            slots = list(ends) if step.slot == -1 else [step.slot]
            cut = {s: max(step.p0, 0) for s in slots if (step.p1 < 0 or step.p1 >= ends.get(s, 0))}
            return {**ends, **{s: min(ends.get(s, 0), end) for s, end in cut.items()}}
        case SeqCp():
            source = ends.get(step.slot, 0)
            end = source if step.p1 < 0 else min(step.p1, source)
            return {**ends, step.into: max(ends.get(step.into, 0), end)}
        case SeqAdd():
            end = ends.get(step.slot, 0)
            moves = max(step.p0, 0) < end and (step.p1 < 0 or step.p1 >= end)
            return {**ends, step.slot: end + step.delta} if moves else ends
        case _:
            return ends
