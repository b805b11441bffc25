"""Small C libraries that look like a build: they have its names, what it needs and its default params, and compute nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from isolate.library.header import Field
from tests.compile import COMPILER

_FUNCTIONS = {
    "llama_model_params": "llama_model_default_params",
    "llama_context_params": "llama_context_default_params",
    "llama_model_quantize_params": "llama_model_quantize_default_params",
}
_C_TYPES = {"pointer": "void *", "uint32_t": "unsigned", "int32_t": "int", "size_t": "unsigned long", "bool": "_Bool"}


def library(path: Path, source: str = "", needs: Sequence[Path] = (), soname: str | None = None) -> Path:
    """Compiles a shared library that needs others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        "-O1",
        "-x",
        "c",
        "-",
        "-o",
        str(path),
        f"-Wl,-soname,{soname or path.name}",
    ]
    # By path: a name like libllama.v0.5.0.so is none that -l finds. -x none: what follows is no C.
    command += ["-Wl,--no-as-needed", "-x", "none", *(str(needed) for needed in needs)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def build(folder: Path, source: str = "void llama_backend_init(void) {}") -> Path:
    """A folder with a libllama that needs a libggml with its CPU backend linked; returns the libllama."""
    base = library(folder / "libggml-base.so.0", "int base;")
    cpu = library(folder / "libggml-cpu.so.0", "int cpu;", [base])
    ggml = library(folder / "libggml.so.0", "int ggml;", [cpu, base])
    return library(folder / "libllama.so", source, [ggml, base], "libllama.so.0")


def source(structs: Mapping[str, Sequence[Field]], batch: str = "result.token = tokens; result.n_tokens = n;") -> str:
    """C of a libllama whose default params are these fields, each with its own default; fields are placed by the compiler."""
    parts = [
        "void llama_backend_init(void) {}",
        "void llama_log_set(void *f, void *u) { (void) f; (void) u; }",
        "void ggml_log_set(void *f, void *u) { (void) f; (void) u; }",
        "struct llama_batch { int n_tokens; int *token; float *embd; int *pos, *n_seq_id; int **seq_id; signed char *logits; };",
        "struct llama_batch llama_batch_get_one(int *tokens, int n) { struct llama_batch result = {0};",
        f"{batch} return result; }}",
    ]
    for name, function in _FUNCTIONS.items():
        if name not in structs:
            continue
        fields = structs[name]
        declared = "".join(f"{_c_type(field)} {field.name};" for field in fields)
        # Field by field, so that padding is left as it was, as an optimizing compiler leaves it.
        stored = "".join(f"r->{field.name} = {_c_value(field)};" for field in fields)
        parts.append(f"struct {name} {{ {declared} }};")
        parts.append(f"void *{function}(struct {name} *r) {{ {stored} return r; }}")
    return "\n".join(parts)


def _c_type(field: Field) -> str:
    return "int" if field.enum else _C_TYPES.get(field.type, field.type)


def _c_value(field: Field) -> str:
    value = field.default or 0
    return f"(void *) {value}" if field.type == "pointer" else str(value)
