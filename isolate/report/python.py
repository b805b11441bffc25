"""A finding as one Python file that makes the calls through llama-cpp-python's own bindings, without isolate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from isolate.case import Case
from isolate.fault import Finding
from isolate.report.lowered import Call, Tokens, calls, model_file

_PROGRAM = '''
import ctypes
import math
import sys

import llama_cpp

context = memory = None
states = {}
greedy = {}


def fault(step, call, got, wanted):
    print(f"FAULT in step {step}: {call} returned {got}, not {wanted}", flush=True)
    sys.exit(1)


def pattern(first, stride, modulo, count):
    return [(first + stride * i) % modulo for i in range(count)]


def open_context(**settings):
    global context, memory
    if context:
        llama_cpp.llama_free(context)
    params = llama_cpp.llama_context_default_params()
    for name, value in settings.items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit("the build made no context with these settings")
    memory = llama_cpp.llama_get_memory(context)
    greedy.clear()


def decode(step, wanted, *runs):
    """Runs are (slot, position of the first token, tokens or None for the greedy one, indices that get logits)."""
    runs = [(slot, start, [greedy[slot]] if tokens is None else tokens, outputs) for slot, start, tokens, outputs in runs]
    batch = llama_cpp.llama_batch_init(max(1, sum(len(tokens) for _, _, tokens, _ in runs)), 0, 1)
    rows = {}
    for slot, start, tokens, outputs in runs:
        begin = batch.n_tokens
        for offset, token in enumerate(tokens):
            at = begin + offset
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, start + offset, 1
            batch.seq_id[at][0] = slot
            batch.logits[at] = offset in outputs
        rows.update({begin + index: slot for index in outputs})
        batch.n_tokens = begin + len(tokens)
    code = llama_cpp.llama_decode(context, batch)
    if code == 0:
        llama_cpp.llama_synchronize(context)
    if code != wanted:
        fault(step, "llama_decode", code, wanted)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for row, slot in rows.items() if code == 0 else ():
        logits = llama_cpp.llama_get_logits_ith(context, row)
        if logits:
            values = logits[:vocabulary]
            if CHECK_NAN and not all(map(math.isfinite, values)):
                fault(step, f"a logit of slot {slot}", "a value that is not finite", "a number")
            greedy[slot] = values.index(max(values))


def take(step, number, slot, flags, wanted):
    size = llama_cpp.llama_state_seq_get_size_ext(context, slot, flags)
    state = states[number] = (ctypes.c_uint8 * max(size, 1))()
    moved = llama_cpp.llama_state_seq_get_data_ext(context, state, size, slot, flags)
    if moved != (size if wanted < 0 else wanted) or (wanted < 0 and not size):
        fault(step, "llama_state_seq_get_data_ext", moved, size if wanted < 0 else wanted)


def set_state(step, number, slot, flags, wanted, cut, byte, change):
    data = bytearray(states[number])
    if cut >= 0:
        del data[cut:]
    if 0 <= byte < len(data):
        data[byte] ^= change
    state, size = (ctypes.c_uint8 * max(len(data), 1)).from_buffer_copy(bytes(data) or b"\\0"), len(data)
    moved = llama_cpp.llama_state_seq_set_data_ext(context, state, size, slot, flags)
    if moved != (size if wanted < 0 else wanted) or (wanted < 0 and not size):
        fault(step, "llama_state_seq_set_data_ext", moved, size if wanted < 0 else wanted)


def seq_rm(step, slot, p0, p1, wanted):
    answer = bool(llama_cpp.llama_memory_seq_rm(memory, slot, p0, p1))
    if answer != wanted:
        fault(step, "llama_memory_seq_rm", answer, wanted)


if len(sys.argv) != 2:
    sys.exit("give the model file")
llama_cpp.llama_backend_init()
model_params = llama_cpp.llama_model_default_params()
model_params.n_gpu_layers = GPU_LAYERS
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), model_params)
if not model:
    sys.exit("the build could not load the model")
'''


def text(finding: Finding, case: Case) -> str:
    """The file's text. IsolateError where the fault cannot be shown by calls alone."""
    return "\n".join(_lines(finding, case)) + "\n"


def _lines(finding: Finding, case: Case) -> Iterator[str]:
    fault = finding.fault
    model, command = model_file(case)
    yield f"# {json.dumps(str(fault.signature))}"
    yield f"# {json.dumps(fault.explanation)}"
    yield "#"
    if command:
        yield f"# model: {command}"
    yield f"# run:   python reproducer.py {model}"
    yield "# Ends with 0 where the fault is gone, with 1 or as the library dies where it is not."
    gpu = fault.kind == "cuda" or "--target cuda" in finding.replay or "--target dry" in finding.replay
    yield f"GPU_LAYERS = {9999 if gpu else 0}"
    yield f"CHECK_NAN = {fault.kind == 'nan'}"
    yield from _PROGRAM.strip("\n").split("\n")
    yield _open(case.context.settings())
    yield from (_call(call) for call in calls(case, fault))
    yield 'print("no fault")'


def _call(call: Call) -> str:
    numbers = ", ".join(map(str, call.arguments))
    if call.name == "open":
        return _open(call.settings or {})
    if call.name == "decode":
        runs = "".join(f", ({run.slot}, {run.start}, {_tokens(run)}, {_outputs(run)})" for run in call.batch)
        return f"decode({call.index}, {numbers}{runs})"
    if call.name in ("take", "set", "seq_rm"):
        return f"{'set_state' if call.name == 'set' else call.name}({call.index}, {numbers})"
    return f"llama_cpp.llama_memory_{call.name}(memory, {numbers})"


def _tokens(run: Tokens) -> str:
    if run.pattern is not None:
        return f"pattern({', '.join(map(str, run.pattern))}, {run.count})"
    return "None" if run.explicit is None else str(list(run.explicit))


def _outputs(run: Tokens) -> str:
    return f"range({run.count})" if run.outputs == tuple(range(run.count)) else str(list(run.outputs))


def _open(settings: dict[str, Any]) -> str:
    return f"open_context({', '.join(f'{name}={_value(name, value)}' for name, value in settings.items())})"


def _value(name: str, value: int | float | bool | str) -> str:
    if name in ("type_k", "type_v"):
        return f'getattr(llama_cpp, "GGML_TYPE_" + {json.dumps(str(value).upper())})'
    if isinstance(value, str):
        return f"llama_cpp.LLAMA_{name.upper()}_{value.upper()}"
    return repr(value)
