"""A model file larger than the machine's memory, of which the disk holds only the header."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, FEED_FORWARD, HEADS, KV_HEADS, VOCABULARY = 8192, 28672, 64, 8, 128


def write(path: Path, size: int) -> int:
    """Write a llama model in F16 of at least `size` bytes; the bytes it has in the end. Its weights are zeros."""
    head = WIDTH // HEADS
    layer = {
        "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (KV_HEADS * head, WIDTH), "attn_v": (KV_HEADS * head, WIDTH),
        "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,), "ffn_gate": (FEED_FORWARD, WIDTH), "ffn_up": (FEED_FORWARD, WIDTH),
        "ffn_down": (WIDTH, FEED_FORWARD),
    }  # fmt: skip
    bytes_of_layer = sum(2 * int(np.prod(shape)) for shape in layer.values())
    layers = -(-size // bytes_of_layer)
    tensors = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }
    for number in range(layers):
        tensors |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    total = 0
    for name, shape in tensors.items():
        kind: np.dtype[Any] = np.dtype(np.float32) if len(shape) == 1 else np.dtype(np.float16)
        count = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(name, shape, kind, count)
        total += gguf.GGUFWriter.ggml_pad(count, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    # The rest of the file is a hole.
    start = gguf.GGUFWriter.ggml_pad(path.stat().st_size, 32)
    os.truncate(path, start + total)
    return start + total
