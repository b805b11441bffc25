"""The zoo as data: one small architecture for each kind of memory that llama.cpp has.

Names of metadata and tensors are those of llama.cpp's loader. Every model loads in each build that knows its
architecture, from llama-cpp-python 0.3.16 on.
"""

from __future__ import annotations

from math import sqrt

from isolate.recipes import (
    MEMORY_GAIN,
    VOCABULARY,
    WIDTH,
    Recipe,
    Tensor,
    Value,
    attention,
    attention_biases,
    attention_metadata,
    bias,
    ends,
    experts,
    feed_forward,
    head_norms,
    matrix,
    norm,
    scales,
    scan_metadata,
    selective_scan,
    shared_expert,
)


def _llama() -> Recipe:
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [norm(f"{block}.attn_norm"), *attention(block, 2, 1)]
        tensors += [norm(f"{block}.ffn_norm"), *feed_forward(block)]
    return Recipe(
        "llama", "llama", "dense attention", "attention", attention_metadata(2, 1), tuple(tensors), alike=True
    )


def _qwen2vl() -> Recipe:
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [norm(f"{block}.attn_norm"), *attention(block, 2, 1), *attention_biases(block, 2, 1)]
        tensors += [norm(f"{block}.ffn_norm"), *feed_forward(block)]
    metadata = attention_metadata(2, 1) | {"rope.dimension_sections": [16, 24, 24, 0]}
    about = "dense attention with M-RoPE, whose cells cannot be shifted"
    return Recipe("qwen2vl", "qwen2vl", about, "attention", metadata, tuple(tensors), shift=False, alike=True)


def _gemma3() -> Recipe:
    # every sixth layer has no window, in every build; a model of windows only would abort in builds before mid-2026
    layers = 6
    # the graph multiplies embeddings by the square root of their width
    tensors = ends(embedding=1 / sqrt(WIDTH))
    for block in (f"blk.{layer}" for layer in range(layers)):
        tensors += [norm(f"{block}.attn_norm"), *attention(block, 2, 1), *head_norms(block)]
        tensors += [norm(f"{block}.post_attention_norm"), norm(f"{block}.ffn_norm"), *feed_forward(block)]
        tensors += [norm(f"{block}.post_ffw_norm")]
    metadata = attention_metadata(2, 1, layers) | {"attention.sliding_window": 32, "rope.freq_base_swa": 10000.0}
    about = "a sliding window in five of six layers, dense"
    return Recipe("gemma3", "gemma3", about, "window", metadata, tuple(tensors), window=32)


def _gpt_oss() -> Recipe:
    # all experts used: a router that may choose turns rounding into a jump
    count, width = 2, WIDTH
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [norm(f"{block}.attn_norm"), *attention(block, 2, 1), *attention_biases(block, 2, 1)]
        tensors += [bias(f"{block}.attn_output", WIDTH), Tensor(f"{block}.attn_sinks.weight", (2,), 0.0, 0.5)]
        tensors += [norm(f"{block}.post_attention_norm"), *experts(block, width, count)]
        tensors += [bias(f"{block}.ffn_gate_inp", count)]
        tensors += [bias(f"{block}.ffn_{part}_exps", width, count) for part in ("gate", "up", "down")]
    metadata = attention_metadata(2, 1) | {
        "expert_count": count,
        "expert_used_count": count,
        "expert_feed_forward_length": width,
        "attention.sliding_window": 32,
    }
    about = "mixture of experts, every other layer with a sliding window, attention sinks"
    return Recipe("gpt-oss", "gpt-oss", about, "window", metadata, tuple(tensors), window=32)


def _qwen3moe() -> Recipe:
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [norm(f"{block}.attn_norm"), *attention(block, 2, 2), *head_norms(block)]
        tensors += [norm(f"{block}.ffn_norm"), *experts(block, 384, 2)]
    metadata = attention_metadata(2, 2, feed_forward=384) | {
        "expert_count": 2,
        "expert_used_count": 2,
        "expert_feed_forward_length": 384,
    }
    return Recipe("qwen3moe", "qwen3moe", "mixture of experts", "attention", metadata, tuple(tensors), alike=True)


def _qwen35moe() -> Recipe:
    tensors = ends()
    # a gated delta net: 2 key heads and 2 value heads of 128
    tensors += [
        norm("blk.0.attn_norm"),
        matrix("blk.0.attn_qkv", WIDTH, 768, gain=MEMORY_GAIN),
        matrix("blk.0.attn_gate", WIDTH, 256),
        Tensor("blk.0.ssm_conv1d.weight", (4, 768), 0.0, 1.0),
        bias("blk.0.ssm_dt", 2, mean=-2.0, deviation=0.5),
        Tensor("blk.0.ssm_a", (2,), -0.1, 0.05),
        matrix("blk.0.ssm_beta", WIDTH, 2),
        matrix("blk.0.ssm_alpha", WIDTH, 2),
        norm("blk.0.ssm_norm", 128),
        matrix("blk.0.ssm_out", 256, WIDTH, gain=MEMORY_GAIN),
    ]
    tensors += [norm("blk.1.attn_norm"), *attention("blk.1", 2, 2, gate=2), *attention_biases("blk.1", 2, 2, gate=2)]
    tensors += head_norms("blk.1")
    for block in ("blk.0", "blk.1"):
        tensors += [norm(f"{block}.post_attention_norm"), *experts(block, 384, 2, fused=True)]
        tensors += [matrix(f"{block}.ffn_gate_inp_shexp", WIDTH), *shared_expert(block, 192)]
    # the launches of a run recorded on a GPU came from a model that had them
    tensors += scales(tensors, 2)
    metadata = attention_metadata(2, 2, feed_forward=384) | {
        "expert_count": 2,
        "expert_used_count": 2,
        "expert_feed_forward_length": 384,
        "expert_shared_feed_forward_length": 192,
        "full_attention_interval": 2,
        "rope.dimension_sections": [32, 32, 32, 32],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 256,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 2,
    }
    about = "mixture of experts, one recurrent layer (gated delta net) and one of attention"
    name = "qwen35moe"
    return Recipe(name, name, about, "hybrid", metadata, tuple(tensors), shift=False, partial_removal=False)


def _lfm2() -> Recipe:
    tensors = [
        # older builds know this architecture only with an output that is the embedding, and misname the last norm
        Tensor("token_embd.weight", (WIDTH, VOCABULARY), 0.0, 1 / sqrt(WIDTH)),
        norm("token_embd_norm"),
        Tensor("blk.0.shortconv.conv.weight", (3, WIDTH), 0.0, 1.0),
        matrix("blk.0.shortconv.in_proj", WIDTH, 3 * WIDTH),
        matrix("blk.0.shortconv.out_proj", WIDTH, WIDTH),
    ]
    tensors += [*attention("blk.1", 2, 1), *head_norms("blk.1")]
    for block in ("blk.0", "blk.1"):
        tensors += [norm(f"{block}.attn_norm"), norm(f"{block}.ffn_norm"), *feed_forward(block)]
    metadata = attention_metadata(2, [0, 1]) | {"shortconv.l_cache": 3}
    about = "one recurrent layer (short convolution) and one of attention, dense"
    return Recipe("lfm2", "lfm2", about, "hybrid", metadata, tuple(tensors), partial_removal=False)


def _falcon_h1() -> Recipe:
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [*selective_scan(block, 512, 128, 2, 8), *attention(block, 2, 1), *feed_forward(block)]
        # the loader asks for it without the usual suffix
        tensors += [Tensor(f"{block}.ffn_norm", (WIDTH,), 1.0, 0.1)]
    metadata = attention_metadata(2, 1) | scan_metadata(512, 128, 2, 8)
    about = "a recurrent mixer (Mamba-2) beside attention in every layer, dense"
    return Recipe(
        "falcon-h1", "falcon-h1", about, "hybrid", metadata, tuple(tensors), partial_removal=False, alike=True
    )


def _mamba2() -> Recipe:
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += selective_scan(block, 512, 128, 2, 8)
    metadata: dict[str, Value] = {
        "block_count": 2,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **scan_metadata(512, 128, 2, 8),
    }
    about = "recurrent only (Mamba-2)"
    return Recipe("mamba2", "mamba2", about, "recurrent", metadata, tuple(tensors), partial_removal=False, alike=True)


def _mamba() -> Recipe:
    inner, state, rank = 512, 16, 256
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [
            norm(f"{block}.attn_norm"),
            matrix(f"{block}.ssm_in", WIDTH, 2 * inner, gain=MEMORY_GAIN),
            Tensor(f"{block}.ssm_conv1d.weight", (4, inner), 0.0, 1.0),
            bias(f"{block}.ssm_conv1d", inner),
            matrix(f"{block}.ssm_x", inner, rank + 2 * state, gain=MEMORY_GAIN),
            matrix(f"{block}.ssm_dt", rank, inner),
            bias(f"{block}.ssm_dt", inner, mean=-2.0, deviation=0.5),
            Tensor(f"{block}.ssm_a", (state, inner), -0.1, 0.05),
            Tensor(f"{block}.ssm_d", (inner,), 0.5, 0.1),
            matrix(f"{block}.ssm_out", inner, WIDTH, gain=MEMORY_GAIN),
        ]
    metadata: dict[str, Value] = {
        "block_count": 2,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **scan_metadata(inner, state, 0, rank),
    }
    about = "recurrent only (Mamba)"
    return Recipe("mamba", "mamba", about, "recurrent", metadata, tuple(tensors), partial_removal=False, alike=True)


def _deepseek2() -> Recipe:
    heads, rope, nope, value, kv_rank, q_rank = 2, 64, 256, 128, 512, 256
    count, width = 2, WIDTH
    tensors = ends()
    for block in ("blk.0", "blk.1"):
        tensors += [
            norm(f"{block}.attn_norm"),
            matrix(f"{block}.attn_q_a", WIDTH, q_rank),
            norm(f"{block}.attn_q_a_norm", q_rank),
            matrix(f"{block}.attn_q_b", q_rank, heads * (nope + rope), gain=MEMORY_GAIN),
            matrix(f"{block}.attn_kv_a_mqa", WIDTH, kv_rank + rope),
            norm(f"{block}.attn_kv_a_norm", kv_rank),
            matrix(f"{block}.attn_k_b", nope, kv_rank, heads),
            matrix(f"{block}.attn_v_b", kv_rank, value, heads, gain=MEMORY_GAIN),
            matrix(f"{block}.attn_output", heads * value, WIDTH, gain=MEMORY_GAIN),
            norm(f"{block}.ffn_norm"),
        ]
    tensors += [*feed_forward("blk.0"), *experts("blk.1", width, count), *shared_expert("blk.1", width)]
    metadata: dict[str, Value] = {
        "block_count": 2,
        "feed_forward_length": WIDTH,
        "leading_dense_block_count": 1,
        "expert_count": count,
        "expert_used_count": count,
        "expert_shared_count": 1,
        "expert_feed_forward_length": width,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 1,
        "attention.head_count": heads,
        # the compressed K and V are one head that all query heads share
        "attention.head_count_kv": 1,
        "attention.key_length": kv_rank + rope,
        "attention.value_length": kv_rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": value,
        "attention.q_lora_rank": q_rank,
        "attention.kv_lora_rank": kv_rank,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": rope,
        "rope.freq_base": 10000.0,
    }
    about = "multi-head latent attention (one compressed row for K and V), mixture of experts"
    return Recipe("deepseek2", "deepseek2", about, "attention", metadata, tuple(tensors))


ZOO: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _llama(),
        _qwen2vl(),
        _gemma3(),
        _gpt_oss(),
        _qwen3moe(),
        _qwen35moe(),
        _lfm2(),
        _falcon_h1(),
        _mamba2(),
        _mamba(),
        _deepseek2(),
    )
}
