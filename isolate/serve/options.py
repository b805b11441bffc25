"""llama-server's options, by its own names, as far as they decide what its slots do.

Names, defaults and meanings are those that `llama-server --help` of llama.cpp 0.3.36 prints (the release that
llama-cpp-python carries by that number); `Options` checks what the server would refuse, or would take and not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from isolate.case import MAX_CONTEXT, MAX_SEQUENCES, Context, Name
from isolate.errors import IsolateError

#: other spellings of the same options
ALIASES = {
    "np": "parallel",
    "c": "ctx-size",
    "b": "batch-size",
    "ub": "ubatch-size",
    "cb": "cont-batching",
    "fa": "flash-attn",
    "ctk": "cache-type-k",
    "ctv": "cache-type-v",
    "kvu": "kv-unified",
    "ctxcp": "ctx-checkpoints",
    "swa-checkpoints": "ctx-checkpoints",
    "cms": "checkpoint-min-step",
    "cram": "cache-ram",
    "sps": "slot-prompt-similarity",
}
#: what `true` stands for where the server takes a number; `false` is 0
SWITCHED_ON = {"ctx-checkpoints": 32, "cache-ram": 8192}
PLAIN_TYPES = frozenset({"f32", "f16", "bf16"})

Size = Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]


class ServeError(IsolateError):
    """Settings or requests that no server could be given: names the option and what is wrong with it."""


class Options(Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """How a server is started."""

    parallel: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] = 1
    #: of all slots together; each gets an equal part unless the cache is unified
    ctx_size: Size = 4096
    batch_size: Size = 2048
    ubatch_size: Size = 512
    cont_batching: bool = True
    flash_attn: Literal["on", "off", "auto"] = "auto"
    cache_type_k: Name = "f16"
    cache_type_v: Name = "f16"
    kv_unified: bool = False
    swa_full: bool = False
    cache_prompt: bool = True
    #: shortest chunk that is moved to where a new prompt has it; 0 moves none
    cache_reuse: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] = 0
    #: most that a slot keeps; 0 takes none
    ctx_checkpoints: Annotated[int, Meta(ge=0, le=1 << 16)] = 32
    #: tokens between two checkpoints
    checkpoint_min_step: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] = 8192
    #: MiB of whole states in host memory; 0 keeps none, -1 has no limit
    cache_ram: Annotated[int, Meta(ge=-1, le=1 << 30)] = 8192
    #: without `cache-ram` the server switches this off by itself
    cache_idle_slots: bool = True
    context_shift: bool = False
    #: tokens of the prompt that a context shift keeps; -1 is all of it
    keep: Annotated[int, Meta(ge=-1, le=MAX_CONTEXT)] = 0
    slot_prompt_similarity: Annotated[float, Meta(ge=0, le=1)] = 0.1
    #: isolate's own: checkpoints stay on the device (LLAMA_STATE_SEQ_FLAGS_ON_DEVICE), where the build has that
    checkpoints_on_device: bool = False

    def check(self, where: str) -> Options:
        """These options; ServeError, with `where` they stand, when two of them contradict each other."""
        if self.flash_attn == "off" and self.cache_type_v not in PLAIN_TYPES:
            raise ServeError(
                f"{where}: `flash-attn` off and `cache-type-v` {self.cache_type_v} exclude each other: llama.cpp keeps V "
                "in a quantized type only with flash attention"
            )
        if self.cache_reuse and not self.cache_prompt:
            raise ServeError(f"{where}: `cache-reuse` {self.cache_reuse} needs `cache-prompt`, which is off")
        if self.checkpoints_on_device and not self.ctx_checkpoints:
            raise ServeError(f"{where}: `checkpoints-on-device` needs `ctx-checkpoints`, which is 0")
        if self.slot_context() < 8:
            raise ServeError(f"{where}: `ctx-size` {self.ctx_size} leaves {self.slot_context()} tokens a slot")
        return self

    def slot_context(self) -> int:
        """Tokens that one slot can hold: its part of the cache, or all of it where it is unified (llama_n_ctx_seq)."""
        padded = -(-self.ctx_size // 256) * 256
        return padded if self.kv_unified else -(-(padded // self.parallel) // 256) * 256

    def batch(self) -> int:
        """Tokens in a batch at most: llama_context takes no more than the context holds."""
        return min(self.batch_size, -(-self.ctx_size // 256) * 256)

    def ubatch(self) -> int:
        """Tokens in an ubatch at most."""
        return min(self.ubatch_size, self.batch())

    def idle_slots(self) -> bool:
        """Whether idle slots are saved when a task starts."""
        return self.cache_idle_slots and self.cache_ram != 0

    def context(self) -> Context:
        """The context the server makes."""
        words: dict[str, Literal["enabled", "disabled", "auto"]] = {"on": "enabled", "off": "disabled", "auto": "auto"}
        return Context(
            n_ctx=self.ctx_size,
            n_batch=self.batch(),
            n_ubatch=self.ubatch(),
            n_seq_max=self.parallel,
            type_k=self.cache_type_k,
            type_v=self.cache_type_v,
            flash_attn_type=words[self.flash_attn],
            kv_unified=self.kv_unified,
            swa_full=self.swa_full,
        )


def options(given: Mapping[str, Any], where: str) -> Options:
    """Options from names as a command line or a table has them (`ctx-checkpoints`, `ctxcp`, a switch as true or false).

    ServeError, with `where` they stand, for a name the server does not have, one that is given twice, or a wrong value.
    """
    named: dict[str, Any] = {}
    for name, value in given.items():
        full = ALIASES.get(name.lstrip("-"), name.lstrip("-"))
        if full in named:
            raise ServeError(f"{where}: `{full}` is given twice (also as `{name}`)")
        if isinstance(value, bool) and full in SWITCHED_ON:
            value = SWITCHED_ON[full] if value else 0
        named[full] = value
    known = {field.encode_name for field in msgspec.structs.fields(Options)}
    for name in named:
        if name not in known:
            raise ServeError(f"{where}: there is no option `{name}`; there are {', '.join(sorted(known))}")
    try:
        return msgspec.convert(named, Options).check(where)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise ServeError(f"{where}: `{place.rstrip('`')}`: {what[0].lower()}{what[1:]}") from None
