"""Struct layouts and enum values from the text of a llama.h, for the few structs that cross the boundary by value.

A small reader of C declarations, no compiler: it knows the field types these structs are made of and refuses any other
by name. Offsets follow the natural alignment of the System V ABI; `layout.py` checks them against the running build.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from isolate.errors import BuildError

#: the structs that are passed or returned by value, or filled in by isolate
STRUCTS = ("llama_model_params", "llama_context_params", "llama_batch", "llama_model_quantize_params")
#: enums that no field of those has, and that isolate names all the same
_MORE_ENUMS = ("llama_process_type",)
#: `#define LLAMA_STATE_SEQ_FLAGS_x n`, kept as if it were an enum of this name
STATE_FLAGS = "llama_state_seq_flags"

#: bytes (and alignment) of the C types a field may have; `enum x` is 4, any pointer 8
SIZES = {
    "bool": 1, "int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4, "int": 4, "float": 4,
    "int64_t": 8, "uint64_t": 8, "size_t": 8, "double": 8, "pointer": 8,
}  # fmt: skip

#: typedefs of ggml.h and ggml-backend.h, for a llama.h that comes alone
_TYPEDEFS = {
    "ggml_backend_sched_eval_callback": "pointer",
    "ggml_abort_callback": "pointer",
    "ggml_log_callback": "pointer",
    "ggml_backend_dev_t": "pointer",
    "ggml_backend_buffer_type_t": "pointer",
}

#: functions that return defaults, and where llama.cpp defines them, below src
_DEFAULTS = {
    "llama_model_params": ("llama_model_default_params", "llama-model.cpp"),
    "llama_context_params": ("llama_context_default_params", "llama-context.cpp"),
    "llama_model_quantize_params": ("llama_model_quantize_default_params", "llama-quant.cpp"),
}

Value = int | float


@dataclass(frozen=True)
class Field:
    """One field of a struct."""

    name: str
    #: a key of SIZES, or `enum NAME`
    type: str
    #: bytes from the start of the struct
    offset: int
    size: int
    #: what the default-params function puts there (pointers 0, bools 0 or 1); None where that is not known
    default: Value | None = None

    @property
    def enum(self) -> str | None:
        """The enum's name, for a field that has one."""
        return self.type[5:] if self.type.startswith("enum ") else None


@dataclass(frozen=True)
class Declarations:
    """What isolate needs of one llama.h."""

    structs: Mapping[str, tuple[Field, ...]]
    #: enum name -> its enumerators' values, in order
    enums: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def read_header(path: Path) -> Declarations:
    """Reads a llama.h, and beside it (or in the source tree it lies in) ggml's headers and the defaults in llama.cpp's source."""
    source = path.parent.parent
    ggml = ""
    for folder in (path.parent, source / "ggml" / "include"):
        if (folder / "ggml.h").is_file():
            ggml = "".join(_text(folder / name) for name in ("ggml.h", "ggml-backend.h") if (folder / name).is_file())
            break
    files = {name: source / "src" / file for name, (_, file) in _DEFAULTS.items()}
    sources = {name: _text(file) for name, file in files.items() if file.is_file()}
    return parse(_text(path), str(path), ggml, sources)


def parse(text: str, name: str, ggml: str = "", sources: Mapping[str, str] | None = None) -> Declarations:
    """Reads declarations. `name` is what to call the text in an error; `sources` are struct name -> C++ source of its defaults."""
    text, ggml = _bare(text), _bare(ggml)
    constants = _constants(ggml) | _constants(text)
    typedefs = _TYPEDEFS | _typedefs(ggml) | _typedefs(text)
    structs: dict[str, tuple[Field, ...]] = {}
    for struct in STRUCTS:
        fields = _fields(text, struct, typedefs, name)
        if fields is not None:
            structs[struct] = _with_defaults(struct, fields, (sources or {}).get(struct, ""), constants)
    missing = [struct for struct in STRUCTS[:2] if struct not in structs]
    if missing:
        raise BuildError(
            f"{name} does not define struct {missing[0]}: pass --include the llama.h the build was made from"
        )
    wanted = {part.enum for fields in structs.values() for part in fields if part.enum} | set(_MORE_ENUMS)
    enums = {enum: values for enum, values in _enums(text, constants).items() if enum in wanted}
    flags = {key: value for key, value in constants.items() if key.startswith("LLAMA_STATE_SEQ_FLAGS_")}
    if flags:
        enums[STATE_FLAGS] = flags
    return Declarations(structs, enums)


def place(fields: list[tuple[str, str]]) -> tuple[Field, ...]:
    """Gives (name, type) pairs their offsets by natural alignment."""
    placed: list[Field] = []
    offset = 0
    for name, kind in fields:
        size = 4 if kind.startswith("enum ") else SIZES[kind]
        offset = (offset + size - 1) // size * size
        placed.append(Field(name, kind, offset, size))
        offset += size
    return tuple(placed)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise BuildError(f"{path} cannot be read ({error.strerror}): pass --include another llama.h") from error


def _bare(text: str) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)


def _fields(text: str, struct: str, typedefs: Mapping[str, str], name: str) -> tuple[Field, ...] | None:
    match = re.search(rf"\bstruct\s+{struct}\s*\{{([^{{}}]*)\}}", text)
    if match is None:
        return None
    if "#" in match[1]:
        raise BuildError(
            f"struct {struct} in {name} depends on the preprocessor: pass --include a llama.h where it does not"
        )
    pairs: list[tuple[str, str]] = []
    for declaration in filter(None, (part.strip() for part in match[1].split(";"))):
        parsed = re.fullmatch(r"(.*?)(\w+)", declaration, re.DOTALL)
        kind = _type(parsed[1], typedefs) if parsed else None
        if parsed is None or kind is None:
            raise BuildError(
                f"isolate does not know the type in '{' '.join(declaration.split())}' of struct {struct} in {name}"
            )
        pairs.append((parsed[2], kind))
    return place(pairs)


def _type(words: str, typedefs: Mapping[str, str]) -> str | None:
    if "*" in words:
        return "pointer"
    words = " ".join(word for word in words.split() if word != "const")
    if words.startswith("enum ") or words in SIZES:
        return words
    return _type(typedefs[words], {}) if words in typedefs else None


def _typedefs(text: str) -> dict[str, str]:
    found = dict.fromkeys(re.findall(r"\btypedef\b[^;{}]*?\(\s*\*\s*(\w+)\s*\)\s*\(", text), "pointer")
    for words, name in re.findall(r"\btypedef\s+([^;{}()]*?)(\w+)\s*;", text):
        found[name] = "pointer" if "*" in words else " ".join(words.split())
    return found


def _constants(text: str) -> dict[str, int]:
    """Values of `#define NAME number` and of every enumerator."""
    found: dict[str, int] = {}
    for name, expression in re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n\\]{1,60})$", text, re.MULTILINE):
        value = _evaluate(expression, found)
        if isinstance(value, int):
            found[name] = value
    for values in _enums(text, found).values():
        found |= values
    return found


def _enums(text: str, constants: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Enumerators by enum. One whose value needs a header that is not here is left out, and those counted from it."""
    found: dict[str, dict[str, int]] = {}
    for enum, body in re.findall(r"\benum\s+(\w+)\s*\{([^{}]*)\}", text):
        values: dict[str, int] = {}
        following: int | None = 0
        for part in filter(None, (part.strip() for part in body.split(","))):
            name, _, expression = (word.strip() for word in part.partition("="))
            if expression:
                value = _evaluate(expression, {**constants, **values})
                following = value if isinstance(value, int) else None
            if following is not None:
                values[name] = following
                following += 1
        found[enum] = values
    return found


def _with_defaults(
    struct: str, fields: tuple[Field, ...], source: str, constants: Mapping[str, int]
) -> tuple[Field, ...]:
    if struct not in _DEFAULTS:
        return fields
    pattern = rf"\b{_DEFAULTS[struct][0]}\s*\([^)]*\)\s*\{{\s*(?:struct\s+)?{struct}\s+result\s*=\s*\{{([^{{}}]*)\}}"
    start = source.find(_DEFAULTS[struct][0] + "()")
    match = re.search(pattern, _bare(source[max(start, 0) : start + 10_000]))
    if match is None:
        return fields
    values = [part.strip() for part in match[1].split(",") if part.strip()]
    if len(values) > len(fields):
        return fields
    # C++ sets what an aggregate's initializer leaves out to zero.
    values += ["0"] * (len(fields) - len(values))
    # A fork that adds a type changes a count and nothing else.
    return tuple(
        replace(part, default=None if value.endswith("_COUNT") else _evaluate(value, constants))
        for part, value in zip(fields, values, strict=True)
    )


_WORDS: dict[str, int] = {"true": 1, "false": 0, "nullptr": 0, "NULL": 0}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitOr: operator.or_,
    ast.LShift: operator.lshift,
}


def _evaluate(expression: str, constants: Mapping[str, int]) -> Value | None:
    """The value of a constant expression of numbers, names, `-`, `+`, `*`, `|` and `<<`; None for anything else."""
    plain = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]+\b", r"\1", expression)
    plain = re.sub(r"(\d\.\d*|\.\d+)[fF]\b", r"\1", plain)
    try:
        return _value(ast.parse(plain.strip(), mode="eval").body, constants)
    except (SyntaxError, ValueError, KeyError):
        return None


def _value(node: ast.expr, constants: Mapping[str, int]) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return _WORDS[node.id] if node.id in _WORDS else constants[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, constants)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, constants), _value(node.right, constants)
        shifts_too_far = isinstance(node.op, ast.LShift) and not 0 <= right < 64
        if isinstance(left, int) and isinstance(right, int) and not shifts_too_far:
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError
