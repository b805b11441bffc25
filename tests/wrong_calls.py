"""Runs a program with llama-cpp-python's calls made wrong, as native/wrong_calls.c does: `WRONG=what python wrong_calls.py PROGRAM MODEL`."""

from __future__ import annotations

import ctypes
import math
import os
import runpy
import sys
from typing import Any

import llama_cpp

what = os.environ["WRONG"]
pos_max, logits_of, set_state = (
    llama_cpp.llama_memory_seq_pos_max,
    llama_cpp.llama_get_logits_ith,
    llama_cpp.llama_state_seq_set_data_ext,
)


def changed_logits(context: Any, row: int) -> Any:
    logits = logits_of(context, row)
    if llama_cpp.llama_n_seq_max(context) == 1:
        return logits
    changed = (ctypes.c_float * 128)(*logits[:128])
    changed[7] = math.nan if what == "nan" else changed[7] + 1
    return changed


def lossy(context: Any, data: Any, size: int, slot: int, flags: int) -> int:
    moved: int = set_state(context, data, size, slot, flags)
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), slot, 3, 4)
    return moved


if what == "positions":
    llama_cpp.llama_memory_seq_pos_max = lambda memory, slot: pos_max(memory, slot) - 1
elif what == "cells":
    llama_cpp.llama_state_seq_set_data_ext = lossy
else:
    llama_cpp.llama_get_logits_ith = changed_logits
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
