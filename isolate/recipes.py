"""What a recipe of a tiny model is, and the parts that several architectures share.

Rows are a multiple of 256 and heads of 128 wherever the architecture lets us choose, so that every K-quant fits the
weights and every type the KV cache, the 128-wide blocks of turbo3 and turbo4 too. Weights have about the spread that
keeps activations near 1, except that what writes and reads the memory is stronger: with plain random weights a model
hardly looks back, and a corrupted state would stay below rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

#: Every model of the zoo has this many tokens: printable ASCII, newline, tab, some merges, four control tokens.
VOCABULARY = 128
CONTEXT_LENGTH = 65536

WIDTH = 256
HEAD = 128
#: Gain of what writes and reads the memory. With more, rounding grows as fast as the signal does; with less, the
#: rounding of a quantized model comes within a hundredth of it.
MEMORY_GAIN = 1.4

Memory = Literal["attention", "window", "recurrent", "hybrid"]
Value = int | float | bool | list[int]

_SCALED = {
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta"),
    *("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_down_exps"),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor: its shape as ggml counts (row length first) and the law of its weights."""

    name: str
    shape: tuple[int, ...]
    mean: float
    #: standard deviation; weights are uniform, so none is further than sqrt(3) of these from the mean
    deviation: float


@dataclass(frozen=True)
class Recipe:
    """A model of the zoo, and what may be asked of its memory."""

    name: str
    architecture: str
    about: str
    memory: Memory
    #: metadata below the architecture's prefix
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]
    #: tokens a sliding window reaches back, 0 without one
    window: int = 0
    #: `seq_add` can move cells, as llama_memory_can_shift answers (for a sliding window, with swa_full)
    shift: bool = True
    #: `seq_rm` can remove a part of a sequence; recurrent memory can only forget all of it
    partial_removal: bool = True
    #: every layer is of the same kind: one will do
    alike: bool = False
    vocabulary: int = VOCABULARY
    context_length: int = CONTEXT_LENGTH

    @property
    def latent(self) -> bool:
        """V is a part of K in the cache (MLA), so both have one type."""
        return "attention.key_length_mla" in self.metadata

    def smaller(self, layers: int | None, experts: int | None) -> Recipe:
        """The model with its first layers and experts alone. ValueError where it has not so many, or needs more."""
        changed = self
        if layers is not None:
            changed = changed._with_layers(layers)
        return changed if experts is None else changed._with_experts(experts)

    def _with_layers(self, layers: int) -> Recipe:
        most = int(str(self.metadata["block_count"]))
        if not (self.alike or layers == most) or not 1 <= layers <= most:
            allowed = f"1 to {most}" if self.alike else f"{most}, which are not alike"
            raise ValueError(f"`layers` of {self.name}: {allowed}")
        metadata = {
            name: value[:layers] if isinstance(value, list) and len(value) == most else value
            for name, value in self.metadata.items()
        }
        kept = [tensor for tensor in self.tensors if _layer(tensor) < layers]
        return replace(self, metadata=metadata | {"block_count": layers}, tensors=tuple(kept))

    def _with_experts(self, experts: int) -> Recipe:
        most = int(str(self.metadata.get("expert_count", 0)))
        if not 1 <= experts <= most:
            raise ValueError(f"`experts` of {self.name}: {f'1 to {most}' if most else 'it has none'}")
        # all are used: a router that may choose turns rounding into a jump
        metadata = self.metadata | {"expert_count": experts, "expert_used_count": experts}
        kept = [
            replace(tensor, shape=(*tensor.shape[:-1], experts)) if _of_experts(tensor) else tensor
            for tensor in self.tensors
        ]
        return replace(self, metadata=metadata, tensors=tuple(kept))


def _layer(tensor: Tensor) -> int:
    parts = tensor.name.split(".")
    return int(parts[1]) if parts[0] == "blk" else -1


def _of_experts(tensor: Tensor) -> bool:
    part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    return part.endswith("_exps") or part == "ffn_gate_inp"


def matrix(name: str, inputs: int, *outputs: int, gain: float = 1.0) -> Tensor:
    """A linear map that takes inputs of variance 1 to outputs of variance gain squared."""
    return Tensor(f"{name}.weight", (inputs, *outputs), 0.0, gain / sqrt(inputs))


def norm(name: str, *width: int, mean: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", width or (WIDTH,), mean, 0.1 * mean)


def bias(name: str, *width: int, mean: float = 0.0, deviation: float = 0.1) -> Tensor:
    return Tensor(f"{name}.bias", width, mean, deviation)


def ends(embedding: float = 1.0) -> list[Tensor]:
    """Embedding, last norm, output."""
    return [
        Tensor("token_embd.weight", (WIDTH, VOCABULARY), 0.0, embedding),
        norm("output_norm"),
        matrix("output", WIDTH, VOCABULARY),
    ]


def attention(block: str, heads: int, kv_heads: int, gate: int = 1) -> list[Tensor]:
    """Q, K, V and output; `gate` 2 makes Q twice as wide, for models that gate the attention's output."""
    return [
        matrix(f"{block}.attn_q", WIDTH, heads * HEAD * gate, gain=MEMORY_GAIN),
        matrix(f"{block}.attn_k", WIDTH, kv_heads * HEAD, gain=MEMORY_GAIN),
        matrix(f"{block}.attn_v", WIDTH, kv_heads * HEAD, gain=MEMORY_GAIN),
        matrix(f"{block}.attn_output", heads * HEAD, WIDTH, gain=MEMORY_GAIN),
    ]


def attention_biases(block: str, heads: int, kv_heads: int, gate: int = 1) -> list[Tensor]:
    """Biases of Q, K and V."""
    widths = {"attn_q": heads * HEAD * gate, "attn_k": kv_heads * HEAD, "attn_v": kv_heads * HEAD}
    return [bias(f"{block}.{name}", width) for name, width in widths.items()]


def head_norms(block: str) -> list[Tensor]:
    """Norms of each head's Q and K."""
    return [norm(f"{block}.attn_q_norm", HEAD, mean=1.2), norm(f"{block}.attn_k_norm", HEAD, mean=1.2)]


def feed_forward(block: str, width: int = WIDTH) -> list[Tensor]:
    """Gate, up and down."""
    return [
        matrix(f"{block}.ffn_gate", WIDTH, width),
        matrix(f"{block}.ffn_up", WIDTH, width),
        matrix(f"{block}.ffn_down", width, WIDTH),
    ]


def experts(block: str, width: int, experts: int, fused: bool = False) -> list[Tensor]:
    """Router and experts; `fused` keeps gate and up in one tensor."""
    tensors = [
        matrix(f"{block}.ffn_gate_inp", WIDTH, experts),
        matrix(f"{block}.ffn_down_exps", width, WIDTH, experts),
    ]
    if fused:
        return [*tensors, matrix(f"{block}.ffn_gate_up_exps", WIDTH, 2 * width, experts)]
    return [
        *tensors,
        matrix(f"{block}.ffn_gate_exps", WIDTH, width, experts),
        matrix(f"{block}.ffn_up_exps", WIDTH, width, experts),
    ]


def shared_expert(block: str, width: int) -> list[Tensor]:
    """An expert that every token goes through."""
    return [
        matrix(f"{block}.ffn_gate_shexp", WIDTH, width),
        matrix(f"{block}.ffn_up_shexp", WIDTH, width),
        matrix(f"{block}.ffn_down_shexp", width, WIDTH),
    ]


def scales(tensors: Sequence[Tensor], experts: int) -> list[Tensor]:
    """The optional factors that newer builds multiply products by: one for each map, one an expert for experts."""
    found = []
    for tensor in tensors:
        stem = tensor.name.removesuffix(".weight")
        if stem.split(".")[-1] in _SCALED and stem != tensor.name:
            width = (experts,) if stem.endswith("_exps") else (1,)
            found += [Tensor(f"{stem}.{kind}", width, 1.0, 0.05) for kind in ("scale", "input_scale")]
    return found


def selective_scan(block: str, inner: int, state: int, groups: int, heads: int) -> list[Tensor]:
    """A Mamba-2 mixer. Decay a step is exp(a * softplus(dt)), about 0.98 here: a prefix of 40 tokens is still seen."""
    convolved = inner + 2 * groups * state
    return [
        norm(f"{block}.attn_norm"),
        matrix(f"{block}.ssm_in", WIDTH, inner + convolved + heads, gain=MEMORY_GAIN),
        Tensor(f"{block}.ssm_conv1d.weight", (4, convolved), 0.0, 1.0),
        bias(f"{block}.ssm_conv1d", convolved),
        bias(f"{block}.ssm_dt", heads, mean=-2.0, deviation=0.5),
        Tensor(f"{block}.ssm_a", (1, heads), -0.1, 0.05),
        Tensor(f"{block}.ssm_d", (1, heads), 0.5, 0.1),
        norm(f"{block}.ssm_norm", inner // groups, groups),
        matrix(f"{block}.ssm_out", inner, WIDTH, gain=MEMORY_GAIN),
    ]


def attention_metadata(
    heads: int, kv_heads: int | list[int], layers: int = 2, feed_forward: int = WIDTH
) -> dict[str, Value]:
    """Metadata of a model with attention."""
    return {
        "block_count": layers,
        "feed_forward_length": feed_forward,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
    }


def scan_metadata(inner: int, state: int, groups: int, heads: int) -> dict[str, Value]:
    """Metadata of a model with state-space layers."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }
