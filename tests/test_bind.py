"""Binding a build: calls when they are used, settings by their llama.h names, and quiet until told otherwise.

Everything that loads a library runs in a child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isolate.library import layout
from tests import stub_build

PRELUDE = """
import ctypes, json, sys
from pathlib import Path
from isolate.errors import BuildError
from isolate.library.bind import Library
from isolate.library.find import find_build
def refused(call, *arguments):
    try:
        call(*arguments)
    except BuildError as error:
        return error.message
    raise AssertionError("not refused")
"""
DEFAULT = "library = Library(find_build())\n"


def child(code: str, *arguments: object) -> Any:
    """What the code prints, as JSON; `arguments` are its sys.argv[1:]."""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code, *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "ISOLATE_BUILD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def stub(folder: Path, release: str, more: str = "") -> Path:
    """A folder with a build that has the structs of a release, and these functions more."""
    stub_build.build(folder, stub_build.source(layout._table()[release].structs) + more)
    return folder


def test_calls_are_ctypes_functions_bound_once() -> None:
    code = (
        DEFAULT
        + """
first = library.llama_n_ctx
print(json.dumps([first is library.llama_n_ctx, isinstance(first, ctypes._CFuncPtr), library.has("llama_n_ctx"),
                  library.has("llama_none"), library.ggml_type_name(8).decode(), hasattr(library, "llama_none")]))
"""
    )
    assert child(code) == [True, True, True, False, "q8_0", False]


def test_every_call_with_a_prototype_is_in_the_default_build() -> None:
    code = (
        DEFAULT
        + """
from isolate.library.prototypes import PROTOTYPES
for name in PROTOTYPES:
    getattr(library, name)
print(json.dumps(len(PROTOTYPES)))
"""
    )
    assert child(code) > 100


def test_a_missing_call_matters_only_when_it_is_used(tmp_path: Path) -> None:
    code = """
library = Library(find_build(sys.argv[1]))
print(json.dumps([library.has("llama_decode"), refused(lambda: library.llama_decode)]))
"""
    has, sentence = child(code, stub(tmp_path, "llama-cpp-python 0.3.36"))
    assert not has
    assert (
        sentence.startswith("this build has no llama_decode, which is needed here: pass --build")
        and str(tmp_path) in sentence
    )


def test_a_library_that_the_loader_refuses(tmp_path: Path) -> None:
    code = "print(json.dumps(refused(lambda: Library(find_build(sys.argv[1])))))"
    gone = stub_build.library(tmp_path / "gone" / "libcublas.so.99", "int one;")
    base = stub_build.library(tmp_path / "libggml-base.so", "int base;", [gone])
    stub_build.library(tmp_path / "libllama.so", "void llama_backend_init(void) {}", [base])
    sentence = child(code, tmp_path)
    assert f"{base} cannot be loaded" in sentence and "libcublas.so.99" in sentence
    assert sentence.endswith("install CUDA, put its folder in LD_LIBRARY_PATH, or use --target dry:GPU")


def test_libraries_that_come_first_are_found_by_all_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the launch hooks stand in front of the CUDA runtime: the build's calls go to the library loaded before it."""
    runtime = stub_build.library(tmp_path / "libruntime.so", "int answer(void) { return 1; }")
    source = stub_build.source(layout._table()["llama-cpp-python 0.3.36"].structs)
    source += "int answer(void); unsigned long llama_max_devices(void) { return answer(); }"
    stub_build.library(tmp_path / "libllama.so", source, [runtime])
    hook = stub_build.library(tmp_path / "hook.so", "int answer(void) { return 2; }")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    code = "library = Library(find_build(sys.argv[1]), [Path(hook) for hook in sys.argv[2:]])\nprint(library.llama_max_devices())"
    assert child(code, tmp_path) == 1
    assert child(code, tmp_path, hook) == 2


# -- settings


def test_settings_arrive_in_the_context() -> None:
    code = (
        DEFAULT
        + """
params = library.context_params()
library.set_params(params, {"n_ctx": 256, "n_seq_max": 3, "type_k": "q8_0", "type_v": "f32", "flash_attn_type": "enabled",
    "pooling_type": "none", "attention_type": "non_causal", "rope_scaling_type": "yarn", "yarn_beta_fast": 2.5,
    "kv_unified": True, "ctx_type": "mtp"}, "context")
print(json.dumps([params.n_ctx, params.n_seq_max, params.type_k, params.type_v, params.flash_attn_type, params.pooling_type,
    params.attention_type, params.rope_scaling_type, params.yarn_beta_fast, params.kv_unified, params.ctx_type, params.n_batch]))
"""
    )
    assert child(code) == [256, 3, 8, 0, 1, 0, 1, 2, 2.5, True, 1, 2048]


def test_pointers_and_callbacks() -> None:
    code = (
        DEFAULT
        + """
params = library.model_params()
none = (ctypes.c_void_p * 1)(None)
library.set_params(params, {"devices": none}, "model")
there = params.devices.value == ctypes.addressof(none)
library.set_params(params, {"devices": None}, "model")
context = library.context_params()
call = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(lambda *given: True)
library.set_params(context, {"cb_eval": call}, "context")
print(json.dumps([there, params.devices.value, context.cb_eval.value == ctypes.cast(call, ctypes.c_void_p).value]))
"""
    )
    assert child(code) == [True, None, True]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"n_none": 1}, "context: this build has no n_none; it has n_ctx, n_batch, n_ubatch, n_seq_max"),
        ({"type_k": "turbo3"}, "context: type_k is 'turbo3', which this build does not have; it has f32, f16, q4_0"),
        ({"type_v": "i32"}, "context: type_v is 'i32', which this build does not have"),
        (
            {"flash_attn_type": "on"},
            "flash_attn_type is 'on', which this build does not have; it has auto, disabled, enabled",
        ),
        ({"n_ctx": -1}, "context: n_ctx is -1, which is not a number from 0 to 4294967295"),
        ({"n_ctx": 2**32}, "context: n_ctx is 4294967296, which is not a number from 0 to 4294967295"),
        ({"n_ctx": "many"}, "context: n_ctx is 'many', which is not a number"),
        ({"n_threads": 2**31}, "context: n_threads is 2147483648, which is not a number"),
        ({"kv_unified": 2}, "context: kv_unified is 2, which is not a number from 0 to 1"),
        ({"yarn_beta_fast": "fast"}, "context: yarn_beta_fast is 'fast', which is not a number"),
    ],
)
def test_a_setting_that_cannot_be(setting: dict[str, object], said: str) -> None:
    code = (
        DEFAULT
        + "print(json.dumps(refused(library.set_params, library.context_params(), json.loads(sys.argv[1]), 'context')))"
    )
    assert said in child(code, json.dumps(setting))


@pytest.mark.parametrize(("value", "expected"), [("auto", False), ("disabled", False), ("enabled", True)])
def test_flash_attention_before_it_was_chosen_by_itself(tmp_path: Path, value: str, expected: bool) -> None:
    code = """
library = Library(find_build(sys.argv[1]))
params = library.context_params()
library.set_params(params, {"flash_attn_type": sys.argv[2]}, "context")
print(json.dumps(params.flash_attn))
"""
    assert child(code, stub(tmp_path, "llama-cpp-python 0.3.16"), value) is expected


def test_a_batch_is_empty() -> None:
    code = (
        DEFAULT
        + "batch = library.LlamaBatch()\nprint(json.dumps([batch.n_tokens, batch.token.value, batch.logits.value]))"
    )
    assert child(code) == [0, None, None]


# -- what there is


def test_cache_types_are_those_a_cache_can_have() -> None:
    found = child(DEFAULT + "print(json.dumps(library.kv_types))")
    assert {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}.items() <= found.items()
    assert not found.keys() & {"i8", "i32", "f64", "q8_1", "q8_K", "iq2_xxs", "iq1_s", "NONE"}
    assert len(set(found.values())) == len(found)


def test_state_flags_by_name() -> None:
    flags = child(DEFAULT + "print(json.dumps(library.state_flags))")
    assert flags == {"none": 0, "swa_only": 1, "partial_only": 1, "on_device": 2}


def test_description_is_plain_data_that_says_what_was_found() -> None:
    found = child(DEFAULT + "print(json.dumps(library.describe()))")
    assert found["build"]["llama"].endswith("llama_cpp/lib/libllama.so")
    assert found["versions"]["ggml_version"] and found["versions"]["ggml_commit"]
    assert (
        "table of releases" in found["layouts"]["source"] and found["layouts"]["bytes"]["llama_context_params"] == 160
    )
    assert found["backends"] == ["CPU"] and found["devices"][0]["total_bytes"] > 0
    assert all(found["calls"].values()) and found["cuda"] is None


def test_a_context_that_is_not_what_was_asked_for_is_refused() -> None:
    """The proof by behaviour of a layout: another context's params stand for a struct that was read wrong."""
    code = (
        DEFAULT
        + """
import os
from isolate.models import make
library.llama_backend_init()
model = library.llama_model_load_from_file(os.fsencode(make(library, "llama", "F32", 1)), library.model_params())
def params(**settings):
    made = library.context_params()
    library.set_params(made, {"n_ctx": 512, "n_seq_max": 2, "n_threads": 1, "n_threads_batch": 1, **settings}, "context")
    return made
context = library.llama_init_from_model(model, params())
library.check_context(context, params())
others = [{"n_threads": 2}, {"n_threads_batch": 2}, {"n_seq_max": 1}, {"n_ctx": 4096}]
print(json.dumps([refused(library.check_context, context, params(**other)) for other in others]))
"""
    )
    for name, sentence in zip(("n_threads", "n_threads_batch", "n_seq_max", "n_ctx"), child(code), strict=True):
        assert sentence.startswith(f"{name} was set to ") and "pass --include" in sentence


# -- what the library says


LOUD = """
params = library.model_params()
library.llama_backend_init()
library.llama_model_load_from_file(sys.argv[-1].encode(), params)
"""


def test_quiet_by_default(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but no more")
    assert child(DEFAULT + LOUD + "print(1)", tmp_path / "bad.gguf") == 1


def test_log_and_abort_go_to_the_callbacks(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but no more")
    code = (
        DEFAULT
        + """
import os
lines = []
@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def on_log(level, text, user):
    lines.append((text.decode(), user))
@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def on_abort(message):
    print(json.dumps([lines[-1], message.decode()]), flush=True)
    os._exit(0)
pointer = lambda call: ctypes.cast(call, ctypes.c_void_p)
library.set_callbacks(pointer(on_abort), pointer(on_log), 7)
"""
        + LOUD
        + "library.llama_batch_ext_init(None) if len(sys.argv) < 2 else library.ggml_new_tensor_4d(None, 99, 1, 1, 1, 1)"
    )
    (line, user), message = child(code, tmp_path / "bad.gguf")
    assert user == 7 and "failed to load model" in line
    assert "GGML_ASSERT(" in message
