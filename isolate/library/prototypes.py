"""The calls isolate makes, with their C types: what `llama.h`, `ggml.h` and `ggml-backend.h` declare.

One line a function: its name, then the types of result and arguments as letters. `Library` binds one when it is first
used. Structs that a build lays out itself stand by name and are put in from its `Layout`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

#: letter -> type. Handles (models, contexts, tensors, batches) are plain addresses: 0 or None is NULL.
_LETTERS: dict[str, Any] = {
    "v": None,
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "b": ctypes.c_bool,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "L": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "f": ctypes.c_float,
    "F": ctypes.POINTER(ctypes.c_float),
    "Z": ctypes.POINTER(ctypes.c_size_t),
}

#: capital words are structs of the build's layout
_STRUCTS = {
    "MODEL": "llama_model_params",
    "CONTEXT": "llama_context_params",
    "BATCH": "llama_batch",
    "QUANTIZE": "llama_model_quantize_params",
}

_TABLE = """
llama_backend_init                    v
llama_backend_free                    v
llama_version                         s
llama_print_system_info               s
llama_log_set                         v p p
llama_max_devices                     z
llama_max_parallel_sequences          z
llama_supports_gpu_offload            b
llama_supports_mmap                   b

llama_model_default_params            MODEL
llama_context_default_params          CONTEXT
llama_model_quantize_default_params   QUANTIZE
llama_model_load_from_file            p s MODEL
llama_model_free                      v p
llama_model_quantize                  u s s QUANTIZE*
llama_init_from_model                 p p CONTEXT
llama_free                            v p
llama_get_model                       p p
llama_get_memory                      p p

llama_model_get_vocab                 p p
llama_model_n_ctx_train               i p
llama_model_n_embd                    i p
llama_model_n_layer                   i p
llama_model_n_head                    i p
llama_model_n_head_kv                 i p
llama_model_n_swa                     i p
llama_model_rope_type                 i p
llama_model_size                      L p
llama_model_n_params                  L p
llama_model_desc                      i p s z
llama_model_meta_count                i p
llama_model_meta_val_str              i p s s z
llama_model_has_encoder               b p
llama_model_has_decoder               b p
llama_model_is_recurrent              b p
llama_model_is_hybrid                 b p
llama_model_is_diffusion              b p
llama_vocab_type                      i p
llama_vocab_n_tokens                  i p

llama_n_ctx                           u p
llama_n_ctx_seq                       u p
llama_n_batch                         u p
llama_n_ubatch                        u p
llama_n_seq_max                       u p
llama_n_rs_seq                        u p
llama_n_threads                       i p
llama_n_threads_batch                 i p
llama_pooling_type                    i p
llama_set_n_threads                   v p i i
llama_set_embeddings                  v p b
llama_set_causal_attn                 v p b
llama_set_abort_callback              v p p p

llama_batch_get_one                   BATCH p i
llama_batch_init                      BATCH i i i
llama_batch_free                      v BATCH
llama_encode                          i p BATCH
llama_decode                          i p BATCH
llama_synchronize                     v p
llama_get_logits                      F p
llama_get_logits_ith                  F p i
llama_get_embeddings                  F p
llama_get_embeddings_ith              F p i
llama_get_embeddings_seq              F p i

llama_batch_ext_init                  p p
llama_batch_ext_free                  v p
llama_batch_ext_clear                 v p
llama_batch_ext_add_token             i p i i
llama_batch_ext_add_seq               b p i i
llama_batch_ext_set_pos               b p i p
llama_batch_ext_set_output_logits     b p i b
llama_process                         i p i p

llama_memory_clear                    v p b
llama_memory_seq_rm                   b p i i i
llama_memory_seq_cp                   v p i i i i
llama_memory_seq_keep                 v p i
llama_memory_seq_add                  v p i i i i
llama_memory_seq_div                  v p i i i i
llama_memory_seq_pos_min              i p i
llama_memory_seq_pos_max              i p i
llama_memory_can_shift                b p

llama_state_get_size                  z p
llama_state_get_data                  z p p z
llama_state_set_data                  z p p z
llama_state_seq_get_size              z p i
llama_state_seq_get_data              z p p z i
llama_state_seq_set_data              z p p z i
llama_state_seq_get_size_ext          z p i u
llama_state_seq_get_data_ext          z p p z i u
llama_state_seq_set_data_ext          z p p z i u
llama_state_seq_save_file             z p s i p z
llama_state_seq_load_file             z p s i p z Z

ggml_version                          s
ggml_commit                           s
ggml_log_set                          v p p
ggml_set_abort_callback               p p
ggml_type_name                        s i
ggml_type_size                        z i
ggml_blck_size                        l i
ggml_row_size                         z i l
ggml_is_quantized                     b i
ggml_quantize_requires_imatrix        b i
ggml_op_name                          s i
ggml_op_desc                          s p
ggml_get_name                         s p
ggml_nbytes                           z p
ggml_nelements                        l p
ggml_tensor_overhead                  z
ggml_new_tensor_4d                    p p i l l l l
ggml_add                              p p p p
ggml_cpy                              p p p p
ggml_init                             p INIT
ggml_free                             v p

ggml_backend_load_all_from_path       v s
ggml_backend_reg_count                z
ggml_backend_reg_get                  p z
ggml_backend_reg_name                 s p
ggml_backend_dev_backend_reg          p p
ggml_backend_dev_count                z
ggml_backend_dev_get                  p z
ggml_backend_dev_name                 s p
ggml_backend_dev_description          s p
ggml_backend_dev_type                 i p
ggml_backend_dev_memory               v p Z Z
ggml_backend_dev_supports_op          b p p
ggml_backend_tensor_get               v p p z z
ggml_view_tensor                      p p p
"""


class InitParams(ctypes.Structure):
    """ggml_init_params (ggml.h), the same in every release."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


PROTOTYPES: dict[str, tuple[str, ...]] = {
    line.split()[0]: tuple(line.split()[1:]) for line in _TABLE.split("\n") if line
}


def types_of(name: str, structs: Mapping[str, type[ctypes.Structure]]) -> tuple[Any, list[Any]]:
    """Result type and argument types of a call; KeyError names the struct where a build's layout lacks it."""
    result, *arguments = (_type(word, structs) for word in PROTOTYPES[name])
    return result, arguments


def _type(word: str, structs: Mapping[str, type[ctypes.Structure]]) -> Any:
    if word in _LETTERS:
        return _LETTERS[word]
    if word == "INIT":
        return InitParams
    made = structs[_STRUCTS[word.rstrip("*")]]
    return ctypes.POINTER(made) if word.endswith("*") else made
