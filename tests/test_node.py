"""Graph nodes: each is in the trace before it is computed, as the build itself names it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isolate import models
from isolate.errors import BuildError
from isolate.trace.node import last_node, measure, node_of
from isolate.trace.record import Kind
from isolate.trace.ring import Ring

CHILD = """
import ctypes, os, signal, sys
from isolate.trace.node import NodeTrace
from isolate.trace.ring import Writer
writer = Writer(sys.argv[2])
import llama_cpp as L
from llama_cpp import llama_cpp as low
ggml = low._lib  # and, by its dependencies, ggml
nodes = NodeTrace(ggml, writer)
for function in (ggml.ggml_get_name, ggml.ggml_op_desc):
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
asked = [0]

@low.ggml_backend_sched_eval_callback
def callback(tensor, ask, user):
    answer = nodes.callback(tensor, ask, user)
    if ask and asked[0] == int(sys.argv[3]):
        print(ggml.ggml_get_name(tensor).decode(), ggml.ggml_op_desc(tensor).decode(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    asked[0] += ask
    return answer

quiet = low.llama_log_callback(lambda *_: None)
low.llama_log_set(quiet, None)
low.llama_backend_init()
model = low.llama_model_load_from_file(sys.argv[1].encode(), low.llama_model_default_params())
params = low.llama_context_default_params()
params.n_ctx, params.cb_eval = 256, callback if sys.argv[3] != "-1" else ctypes.cast(nodes.callback, type(callback))
context = low.llama_init_from_model(model, params)
for step in range(2):
    number = writer.step_begin(step, "decode")
    tokens = (low.llama_token * 5)(1, 2, 3, 4, 5)
    writer.step_end(number, low.llama_decode(context, low.llama_batch_get_one(tokens, 5)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama.gguf"
    models.write_f32("llama", 1, path)
    return path


def decode(model: Path, trace: Path, stop: int = -1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(model), str(trace), str(stop)], check=False, text=True, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize("stop", [0, 17, 40])
def test_the_node_in_flight_is_named_after_a_kill(model: Path, tmp_path: Path, stop: int) -> None:
    child = decode(model, tmp_path / "trace", stop)
    assert child.returncode == -9
    with Ring(tmp_path / "trace") as trace:
        node = last_node(trace)
        assert node is not None
        assert node.index == stop
        assert child.stdout.split("\n")[0] == f"{node.name} {node.op}"
        assert trace.in_flight() == ("decode", 0)


def test_every_node_of_a_decode_is_recorded_with_shape_and_sources(model: Path, tmp_path: Path) -> None:
    assert decode(model, tmp_path / "trace").returncode == 0
    with Ring(tmp_path / "trace") as trace:
        assert last_node(trace) is None  # all came back
        records = [record for record in trace.records() if record.kind == Kind.NODE]
        assert all(record.done for record in records)
        first = [node for record in records if record.step == 0 and (node := node_of(record))]
        second = [node for record in records if record.step == 1 and (node := node_of(record))]
    assert [node.index for node in first] == list(range(len(first)))
    assert [node.op for node in first] == [node.op for node in second]
    product = next(node for node in first if node.name == "Qcur-0" and node.op == "MUL_MAT")
    assert product.type == "f32"
    assert product.shape[1:] == (5, 1, 1)
    assert product.sources == ("blk.0.attn_q.weight", "attn_norm-0")
    assert first[-1].name == "result_output"


def test_a_build_with_other_types_is_refused() -> None:
    name = ctypes.create_string_buffer(b"q9_9")
    named = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(lambda number: ctypes.addressof(name))
    with pytest.raises(BuildError, match=r"ggml type 0 of this build is called b'q9_9', not f32"):
        measure(SimpleNamespace(ggml_type_name=named))


def test_a_build_whose_tensors_hide_their_shape_is_refused() -> None:
    """Tensors that are not laid out as expected: the sources are nowhere."""
    code = """
import ctypes
from llama_cpp import llama_cpp as low
from types import SimpleNamespace
from isolate.trace.node import measure
ggml = low._lib  # and, by its dependencies, ggml
names = "type_name tensor_overhead new_tensor_4d free init".split()
ggml_add = ctypes.CFUNCTYPE(*[ctypes.c_void_p] * 4)(lambda context, a, b: a)
measure(SimpleNamespace(ggml_add=ggml_add, **{f"ggml_{name}": getattr(ggml, f"ggml_{name}") for name in names}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, text=True, stderr=subprocess.PIPE, env={**os.environ}
    )
    assert done.returncode == 1
    assert "holds the known value of `src` at 0 places (offsets []) instead of one" in done.stderr
