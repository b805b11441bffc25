"""The zoo: quick to make, the same everywhere, never half a file, and able to show a wrong state."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest

from isolate import files, models
from isolate.errors import ModelError
from isolate.recipes import Tensor
from isolate.zoo import ZOO
from tests.test_bind import PRELUDE, child

#: `model(name, type)` gives a loaded model; the cache folder is the first argument
SCENE = """
import os
from pathlib import Path
from isolate.case import Context
from isolate.models import make
from isolate.replay.alone import Single
from isolate.replay.noise import measure
library = Library(find_build())
library.llama_backend_init()
folder = Path(sys.argv[1])
params = library.model_params()
library.set_params(params, {"n_gpu_layers": 0}, "model")
def model(name, type):
    loaded = library.llama_model_load_from_file(os.fsencode(make(library, name, type, 1, folder)), params)
    assert loaded
    return loaded
"""


#: SHA-256 of some weights
WEIGHTS = "76833aa35a26842e2ccecf8ac5e446ff25287fa442ca437a0b5a0217df7ffb08"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of these tests' own."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", ZOO)
def test_is_made_in_under_a_second(name: str, tmp_path: Path) -> None:
    # The processor's time: another process must not make it late.
    started = time.process_time()
    models.write_f32(name, 1, tmp_path / "model.gguf")
    assert time.process_time() - started < 1
    assert len(gguf.GGUFReader(tmp_path / "model.gguf").tensors) == len(ZOO[name].tensors)


def test_same_seed_same_file_another_seed_another_file(tmp_path: Path) -> None:
    for file, seed in (("a", 1), ("b", 1), ("c", 2)):
        models.write_f32("llama", seed, tmp_path / file)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_weights_are_the_same_on_every_machine_and_numpy() -> None:
    weights = models._weights(Tensor("blk.0.attn_q.weight", (256, 4), 0.5, 0.25), 7)
    assert (weights.shape, weights.dtype.name) == ((4, 256), "float32")
    assert hashlib.sha256(weights.tobytes()).hexdigest() == WEIGHTS
    assert weights.mean() == pytest.approx(0.5, abs=0.03)
    assert weights.std() == pytest.approx(0.25, abs=0.01)


def test_tokens_are_a_vocabulary() -> None:
    tokens, types = models._vocabulary()
    assert len(tokens) == len(set(tokens)) == len(types) == models.VOCABULARY
    assert set("Hello,world!09") < set(tokens)


@pytest.mark.parametrize("name", ZOO)
def test_recipe_says_what_the_memory_can_do(name: str, cache: Path) -> None:
    code = """
loaded = model(sys.argv[2], "F32")
one = Single(library, loaded, Context(n_ctx=256, n_batch=64, n_ubatch=64, type_k="f32", type_v="f32"), 256)
one.decode([5, 6, 7, 8], 0, set())
print(json.dumps({
    "vocabulary": library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded)),
    "context_length": library.llama_model_n_ctx_train(loaded),
    "window": library.llama_model_n_swa(loaded),
    "shift": library.llama_memory_can_shift(one.memory),
    "partial_removal": library.llama_memory_seq_rm(one.memory, 0, 2, -1),
    "recurrent": library.llama_model_is_recurrent(loaded),
    "hybrid": library.llama_model_is_hybrid(loaded),
}))
"""
    recipe = ZOO[name]
    assert child(SCENE + code, cache, name) == {
        "vocabulary": recipe.vocabulary,
        "context_length": recipe.context_length,
        "window": recipe.window,
        "shift": recipe.shift,
        "partial_removal": recipe.partial_removal,
        "recurrent": recipe.memory == "recurrent",
        "hybrid": recipe.memory == "hybrid",
    }


SMALLER = [
    (name, layers, experts)
    for name, recipe in ZOO.items()
    for layers in ([None, 1] if recipe.alike else [None])
    for experts in ([None, 1] if "expert_count" in recipe.metadata else [None])
    if layers or experts
]


@pytest.mark.parametrize(("name", "layers", "experts"), SMALLER)
def test_a_smaller_one_runs_with_the_same_kind_of_memory(
    name: str, layers: int | None, experts: int | None, cache: Path
) -> None:
    code = """
layers, experts = (int(text) or None for text in sys.argv[3:5])
made = make(library, sys.argv[2], "Q8_0", 1, folder, layers=layers, experts=experts)
loaded = library.llama_model_load_from_file(os.fsencode(made), params)
one = Single(library, loaded, Context(n_ctx=256, n_batch=64, n_ubatch=64, type_k="f32", type_v="f32"), 256)
rows = one.decode([5, 6, 7, 8], 0, {3})
memory = library.llama_model_is_recurrent(loaded), library.llama_model_is_hybrid(loaded)
smaller = made.stat().st_size < make(library, sys.argv[2], "Q8_0", 1, folder).stat().st_size
print(json.dumps([library.llama_model_n_layer(loaded), smaller, *memory, bool((rows[3] ** 2).sum() > 0)]))
"""
    recipe = ZOO[name]
    count, smaller, recurrent, hybrid, computed = child(SCENE + code, cache, name, str(layers or 0), str(experts or 0))
    assert count == (layers or recipe.metadata["block_count"])
    assert (recurrent, hybrid) == (recipe.memory == "recurrent", recipe.memory == "hybrid")
    assert smaller and computed


@pytest.mark.parametrize(
    ("name", "layers", "experts", "says"),
    [("gemma3", 1, None, "6, which are not alike"), ("llama", 3, None, "1 to 2"), ("llama", None, 1, "it has none"), ("qwen3moe", None, 3, "1 to 2")],
)  # fmt: skip
def test_layers_and_experts_that_a_model_cannot_have(
    name: str, layers: int | None, experts: int | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        ZOO[name].smaller(layers, experts)


def test_one_for_each_kind_of_memory() -> None:
    assert {recipe.memory for recipe in ZOO.values()} == {"attention", "window", "recurrent", "hybrid"}
    assert {"llama", "gemma3", "qwen3moe", "qwen35moe", "mamba2", "deepseek2"} <= set(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_can_show_a_wrong_state(name: str, cache: Path) -> None:
    code = """
found = []
for type in ("F32", "Q8_0", "Q3_K"):
    loaded = model(sys.argv[2], type)
    for cache, attention in (("f32", "disabled"), ("q8_0", "enabled")):
        settings = Context(n_ctx=1024, type_k=cache, type_v=cache, flash_attn_type=attention)
        single = Single(library, loaded, settings, 1024)
        noise = measure(single, 1024, weights=type == "F32", cache=cache == "f32")
        single.close()
        found.append((type, cache, noise.signal, noise.shape, noise.level(False)))
    library.llama_model_free(loaded)
print(json.dumps(found))
"""
    for type, cache_type, signal, shape, level in child(SCENE + code, cache, name):
        assert signal > 100 * max(shape, level), (type, cache_type)
        if (type, cache_type) == ("F32", "f32"):
            # the configuration that sees small faults
            assert signal > 1e6 * level


def test_weights_that_do_not_fit_a_block_get_another_type(cache: Path) -> None:
    code = 'print(json.dumps(str(make(library, "qwen35moe", "Q3_K", 1, folder))))'
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(child(SCENE + code, cache)).tensors}
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) > 1}
    types = {name: tensor.tensor_type.name for name, tensor in matrices.items()}
    assert types["blk.0.ffn_gate_up_exps.weight"] == types["output.weight"] == types["token_embd.weight"] == "Q3_K"
    assert types["blk.0.ffn_down_exps.weight"] == "Q4_0"


def test_every_type_can_be_made(cache: Path) -> None:
    code = """
from isolate.models import TYPES
print(json.dumps({type: make(library, "llama", type.lower(), 1, folder).stat().st_size for type in TYPES}))
"""
    sizes = child(SCENE + code, cache)
    assert sizes["Q2_K"] < sizes["Q3_K"] < sizes["Q4_K"] < sizes["Q8_0"] < sizes["F16"] < sizes["F32"]


def test_what_was_made_is_used_again(cache: Path) -> None:
    code = 'made = make(library, "llama", "Q4_K", 1, folder)\nprint(json.dumps([str(made), made.stat().st_mtime_ns]))'
    assert child(SCENE + code, cache) == child(SCENE + code, cache)


def test_two_processes_at_once(tmp_path: Path) -> None:
    code = PRELUDE + SCENE + 'print(make(library, "gemma3", "Q3_K", 5, folder))'
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(outputs)) == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("room", "type"), [(1 << 20, "F32"), (4 << 20, "Q8_0")])
def test_no_room_on_the_disk_leaves_no_half_file(room: int, type: str, tmp_path: Path) -> None:
    code = """
import resource
from isolate.errors import ModelError
size, type = int(sys.argv[2]), sys.argv[3]
if type != "F32":
    make(library, "llama", "F32", 1, folder)
    size = 1 << 19
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    make(library, "llama", type, 1, folder)
except ModelError as error:
    print(json.dumps(error.message))
"""
    message = child(SCENE + code, tmp_path, room, type)
    assert "cannot write the model" in message or "could not make llama in Q8_0" in message
    assert [path.name for path in tmp_path.iterdir() if type in path.name or path.name.startswith(".")] == []


def test_a_name_or_type_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'lama'; it has llama, "):
        models.write_f32("lama", 1, tmp_path / "model.gguf")
    code = """
from isolate.errors import ModelError
try:
    make(library, "llama", "Q9", 1, folder)
except ModelError as error:
    print(json.dumps(error.message))
"""
    assert "no type 'Q9'; it has F32, F16, " in child(SCENE + code, tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the model"):
        models.write_f32("llama", 1, tmp_path / "file" / "model.gguf")


def test_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert files.cache_folder("models") == Path("/elsewhere/isolate/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert files.cache_folder("models") == Path.home() / ".cache/isolate/models"
