"""Tiny models with random weights, written with gguf and quantized by the build that will run them.

The same name, seed and type give the same weights everywhere: they come from the raw bits of a counter-based generator.
Files live in the user's cache folder, named for everything they depend on, and appear there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isolate import files
from isolate.errors import ModelError
from isolate.recipes import VOCABULARY, WIDTH, Recipe, Tensor
from isolate.zoo import ZOO

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from isolate.library.bind import Library

__all__ = ["TYPES", "ZOO", "Recipe", "make", "write_f32"]


class Type(NamedTuple):
    """What weights are stored in."""

    #: llama_ftype of llama.h
    file_type: int
    #: ggml_type that every matrix gets; None where llama.cpp mixes types
    matrices: int | None = None
    #: weights in a block
    block: int = 1


#: Types of model by name; those with _M or _L are llama.cpp's own mixtures.
TYPES = {
    "F32": Type(0, 0),
    "F16": Type(1, 1),
    "BF16": Type(32, 30),
    "Q4_0": Type(2, 2, 32),
    "Q4_1": Type(3, 3, 32),
    "Q5_0": Type(8, 6, 32),
    "Q5_1": Type(9, 7, 32),
    "Q8_0": Type(7, 8, 32),
    "Q2_K": Type(10, 10, 256),
    "Q3_K": Type(11, 11, 256),
    "Q3_K_M": Type(12),
    "Q3_K_L": Type(13),
    "Q4_K": Type(14, 12, 256),
    "Q4_K_M": Type(15),
    "Q5_K": Type(16, 13, 256),
    "Q5_K_M": Type(17),
    "Q6_K": Type(18, 14, 256),
    "IQ3_S": Type(26, 21, 256),
    "IQ4_NL": Type(25, 20, 32),
    "IQ4_XS": Type(30, 23, 256),
    "MXFP4": Type(38),
}

#: Part of every cache key: raise it when the way files are written changes.
FORMAT = 1

_MERGES = (
    *("t h", "i n", "e r", "a n", "o n", "r e", "Ġ t", "Ġ a", "th e", "e n", "a t", "o r", "Ġ th", "Ġth e"),
    *("i s", "e s", "i t", "a r", "in g", "o u", "e d", "Ġ s", "Ġ w", "a l", "l e", "Ġ o", "an d"),
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def recipe_of(name: str) -> Recipe:
    """The zoo's model of that name; ModelError lists what there is."""
    if name not in ZOO:
        raise ModelError(f"the zoo has no model {name!r}; it has {', '.join(ZOO)}")
    return ZOO[name]


def write_f32(name: str, seed: int, path: Path) -> None:
    """Write the model `name` in F32 to `path`; needs no libllama. ModelError when the file cannot be written."""
    recipe = recipe_of(name)

    def named(temporary: Path) -> str:
        _write(recipe, seed, temporary)
        return path.name

    try:
        files.appear(path.parent, named)
    except OSError as error:
        raise _not_written(path, error) from error


def make(
    library: Library, name: str, type: str, seed: int, folder: Path | None = None, *,
    layers: int | None = None, experts: int | None = None,
) -> Path:  # fmt: skip
    """The model `name` in a type of `TYPES`, from the cache folder or made now; call it in the child only.

    `layers`, `experts`: so many of them, the first ones, where the model lets it.

    An F32 file depends on recipe and seed, any other on the build too: its `llama_model_quantize` makes them.
    ModelError says why a model could not be made.
    """
    try:
        recipe = recipe_of(name).smaller(layers, experts)
    except ValueError as error:
        raise ModelError(str(error)) from None
    type = type.upper()
    if type not in TYPES:
        raise ModelError(f"a zoo model has no type {type!r}; it has {', '.join(TYPES)}")
    folder = files.cache_folder("models") if folder is None else folder
    content = hashlib.sha256(repr((FORMAT, asdict(recipe))).encode()).hexdigest()[:12]
    plain = _kept(folder, f"{name}-F32-{seed}-{content}", lambda path: _write(recipe, seed, path))
    if type == "F32":
        return plain
    made = f"{name}-{type}-{seed}-{content}-{library.build.key()}"
    return _kept(folder, made, lambda path: _quantize(library, recipe, plain, type, path))


def _kept(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    try:
        return files.kept(folder, name, ".gguf", write)
    except OSError as error:
        raise _not_written(folder / name, error) from error


def _not_written(path: Path, error: OSError) -> ModelError:
    return ModelError(f"cannot write the model {path}: {error.strerror or error}")


def _vocabulary() -> tuple[list[str], list[int]]:
    """Tokens and their types: a byte-level BPE vocabulary of the characters that prompts for tests are made of."""
    # GPT-2 writes a byte that does not print as the character 256 above it: Ġ is the space, Ċ the newline, ĉ the tab
    characters = [*(chr(code) for code in range(ord("!"), ord("~") + 1)), "Ġ", "Ċ", "ĉ"]
    tokens = [*characters, *(merge.replace(" ", "") for merge in _MERGES), *_CONTROL]
    normal, control = 1, 3  # LLAMA_TOKEN_TYPE_NORMAL and _CONTROL
    return tokens, [control if token in _CONTROL else normal for token in tokens]


def _weights(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    """Uniform weights of the tensor's mean and deviation, the same on every machine and numpy."""
    import numpy as np

    key = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
    # raw bits: numpy promises that they stay the same, and does not promise that of its distributions
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(int(np.prod(tensor.shape)))
    centred = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    weights = np.float32(tensor.mean) + centred * np.float32(tensor.deviation * 3**0.5)
    return weights.reshape(tensor.shape[::-1])


def _write(recipe: Recipe, seed: int, path: Path) -> None:
    # here, since it takes a good part of a second and every command imports this module
    import gguf

    writer: Any = gguf.GGUFWriter(path, recipe.architecture)
    writer.add_name(f"isolate {recipe.name}")
    writer.add_file_type(TYPES["F32"].file_type)
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(recipe.context_length)
    writer.add_embedding_length(WIDTH)
    for key, value in recipe.metadata.items():
        full = f"{recipe.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_array(full, value)
    tokens, types = _vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|pad|>"))
    writer.add_add_bos_token(False)
    for tensor in recipe.tensors:
        writer.add_tensor(tensor.name, _weights(tensor, seed))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _quantize(library: Library, recipe: Recipe, source: Path, type: str, path: Path) -> None:
    wanted = TYPES[type]
    values: dict[str, Any] = {"nthread": 1, "ftype": wanted.file_type}
    if wanted.matrices is not None:
        # where a row does not fit, older builds choose another type only when they are not told to be pure
        values["pure"] = all(tensor.shape[0] % wanted.block == 0 for tensor in recipe.tensors if len(tensor.shape) > 1)
        values["output_tensor_type"] = values["token_embedding_type"] = wanted.matrices
    params = library.quantize_params()
    library.set_params(params, values, "quantize")
    code = library.llama_model_quantize(os.fsencode(source), os.fsencode(path), params)
    if code != 0:
        raise ModelError(f"this build could not make {recipe.name} in {type}: llama_model_quantize returned {code}")
