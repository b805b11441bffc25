"""How the structs of this very build lie in memory: read from its header or a table of releases, and always measured.

`llama_*_default_params()` returns through a pointer that the caller passes (System V ABI, 3.2.3), so calling it on
buffers filled with two different bytes shows how many bytes the build writes, which it leaves alone as padding, and
what it puts in each field. A layout that disagrees with any of that is refused.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from isolate.errors import BuildError
from isolate.library.elf import this_machine
from isolate.library.header import Declarations, Field, Value, read_header

_TABLE = Path(__file__).with_name("layouts.json")
_BUFFER_BYTES = 4096
_FILLS = (0xA5, 0x5A)

#: struct -> the function that returns one by value, for those every build must have
_REQUIRED = {
    "llama_model_params": "llama_model_default_params",
    "llama_context_params": "llama_context_default_params",
    "llama_batch": "llama_batch_get_one",
}
_QUANTIZE = "llama_model_quantize_params"
_QUANTIZE_FUNCTION = "llama_model_quantize_default_params"
#: given to llama_batch_get_one, and expected back
_BATCH_TOKENS = 3


class Pointer(ctypes.c_void_p):
    """A pointer field's type: read back it is an object with `.value`, also when it is NULL."""


_C: dict[str, Any] = {
    "bool": ctypes.c_bool, "int8_t": ctypes.c_int8, "uint8_t": ctypes.c_uint8, "int16_t": ctypes.c_int16,
    "uint16_t": ctypes.c_uint16, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int": ctypes.c_int32,
    "float": ctypes.c_float, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t,
    "double": ctypes.c_double, "pointer": Pointer,
}  # fmt: skip
_UNPACK = {
    "bool": "<B", "int8_t": "<b", "uint8_t": "<B", "int16_t": "<h", "uint16_t": "<H", "int32_t": "<i", "uint32_t": "<I",
    "int": "<i", "float": "<f", "int64_t": "<q", "uint64_t": "<Q", "size_t": "<Q", "double": "<d", "pointer": "<Q",
}  # fmt: skip

Structs = Mapping[str, tuple[Field, ...]]


@dataclass(frozen=True)
class Measured:
    """What a function that returns a struct wrote into the caller's buffer."""

    #: up to the last byte that was written; where `written` is False the value means nothing
    data: bytes
    written: tuple[bool, ...]


@dataclass(frozen=True)
class Layout:
    """The structs of one build, in the form ctypes passes them."""

    #: one sentence: where the layouts come from and how they were checked
    source: str
    #: releases of the table that fit; empty where a header was read
    releases: tuple[str, ...]
    structs: Mapping[str, type[ctypes.Structure]]
    fields: Structs
    #: enum name -> enumerator -> value; `llama_state_seq_flags` holds the LLAMA_STATE_SEQ_FLAGS_ macros
    enums: Mapping[str, Mapping[str, int]]
    #: (struct, field) that no caller may set, and why
    closed: Mapping[tuple[str, str], str]
    measured: Mapping[str, Measured]


def establish(library: ctypes.CDLL, header: Path | None) -> Layout:
    """Establishes the layouts of a loaded libllama.

    From `header` where there is one, else from the releases whose layout fits what is measured. `BuildError` where
    none fits, or where several do that place a field differently.
    """
    measured = _measure_all(library)
    if header is not None:
        return _from_header(header, read_header(header), measured)
    return _from_table(measured)


def _measure_all(library: ctypes.CDLL) -> dict[str, Measured]:
    if this_machine() != "x86_64":
        raise BuildError(f"isolate measures struct layouts on x86_64 only, and this machine is {this_machine()}")
    tokens = (ctypes.c_int32 * _BATCH_TOKENS)()
    arguments: dict[str, tuple[Any, ...]] = {
        "llama_batch": (ctypes.c_void_p(ctypes.addressof(tokens)), ctypes.c_int32(_BATCH_TOKENS))
    }
    found: dict[str, Measured] = {}
    for name, function in {**_REQUIRED, _QUANTIZE: _QUANTIZE_FUNCTION}.items():
        try:
            address = ctypes.cast(library[function], ctypes.c_void_p).value
        except AttributeError as error:
            if name == _QUANTIZE:
                continue
            raise BuildError(
                f"this libllama has no {function}: it is older or newer than what isolate can drive"
            ) from error
        found[name] = measure(address or 0, *arguments.get(name, ()))
    batch = found["llama_batch"]
    expected = struct.pack("<Q", ctypes.addressof(tokens))
    if batch.data[8:16] != expected:
        raise BuildError(
            "llama_batch_get_one does not return its tokens at byte 8: this libllama's llama_batch is unknown to isolate"
        )
    return found


def measure(function: int, *arguments: Any) -> Measured:
    """Calls a function that returns a struct of more than 16 bytes, at this address, on two filled buffers."""
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, *(type(value) for value in arguments))(function)
    results: list[bytes] = []
    for fill in _FILLS:
        buffer = (ctypes.c_uint8 * _BUFFER_BYTES)()
        ctypes.memset(buffer, fill, _BUFFER_BYTES)
        call(ctypes.addressof(buffer), *arguments)
        results.append(bytes(buffer))
    written = [(one, other) != _FILLS for one, other in zip(*results, strict=True)]
    end = _BUFFER_BYTES - written[::-1].index(True) if True in written else 0
    return Measured(results[0][:end], tuple(written[:end]))


def disagreement(fields: Sequence[Field], measured: Measured, known: Mapping[str, set[Value]]) -> str | None:
    """What speaks against these fields being what the build wrote, as a clause; None where nothing does.

    A field without a default of its own may have any of the `known` defaults of its name.
    """
    inside = [False] * _sizeof(fields)
    for part in fields:
        inside[part.offset : part.offset + part.size] = [True] * part.size
    end = _end(fields)
    if not end <= len(measured.data) <= len(inside):
        return f"the build writes {len(measured.data)} bytes, not {end}"
    for part in fields:
        if not all(measured.written[part.offset : part.offset + part.size]):
            return f"the build leaves bytes of {part.name} (at {part.offset}) unwritten"
        value = _decode(part, measured.data)
        allowed = known.get(part.name) if part.default is None else {part.default}
        if part.type == "bool" and allowed is None:
            allowed = {0, 1}
        if allowed and value not in allowed:
            expected = " or ".join(f"{each:g}" for each in sorted(allowed))
            return f"{part.name} at byte {part.offset} reads {value:g} by default, not {expected}"
    padding = [at for at in range(len(measured.data)) if not inside[at]]
    touched = [at for at in padding if measured.written[at]]
    # A build that copies the whole struct writes all padding, as zeros; one that sets fields writes none.
    if touched and (len(touched) != len(padding) or any(measured.data[at] for at in touched)):
        return f"the build writes byte {touched[0]}, which is padding there"
    return None


def _from_header(header: Path, declared: Declarations, measured: Mapping[str, Measured]) -> Layout:
    known = _known_defaults()
    closed: dict[tuple[str, str], str] = {}
    for name, found in measured.items():
        fields = declared.structs.get(name)
        why = (
            f"it does not define struct {name}" if fields is None else disagreement(fields, found, known.get(name, {}))
        )
        if why is None:
            continue
        sentence = f"{header} is not the llama.h this libllama was made from, by struct {name}: {why}; pass --include the right one"
        if name in _REQUIRED:
            raise BuildError(sentence)
        closed[name, ""] = sentence
    return _layout(
        f"from {header}, checked against the sizes, padding and defaults the build returns",
        (), declared.structs, declared.enums, closed, measured,
    )  # fmt: skip


def _from_table(measured: Mapping[str, Measured]) -> Layout:
    table, known = _table(), _known_defaults()
    against = {
        release: {name: why for name in measured if (why := _against(declared, name, measured[name], known))}
        for release, declared in table.items()
    }
    fit = [release for release, reasons in against.items() if not reasons.keys() & _REQUIRED.keys()]
    if not fit:
        raise BuildError(_no_release(against, measured))
    closed: dict[tuple[str, str], str] = {}
    whole = [release for release in fit if not against[release]]
    if not whole and _QUANTIZE in measured:
        why = against[fit[0]][_QUANTIZE]
        closed[_QUANTIZE, ""] = (
            f"the {_QUANTIZE} of this build fit no release isolate knows ({fit[0]}: {why}): pass --include its llama.h"
        )
    fit = whole or fit
    fields, more = _common(fit, table)
    closed |= more
    enums = _common_enums([table[release].enums for release in fit])
    return _layout(
        f"from the table of releases, as {_span(fit)}: the only layout there that fits the sizes, padding and defaults "
        "the build returns",
        tuple(fit), fields, enums, closed, measured,
    )  # fmt: skip


def _against(
    declared: Declarations, name: str, found: Measured, known: Mapping[str, Mapping[str, set[Value]]]
) -> str | None:
    fields = declared.structs.get(name)
    return "it has none" if fields is None else disagreement(fields, found, known.get(name, {}))


def _no_release(against: Mapping[str, Mapping[str, str]], measured: Mapping[str, Measured]) -> str:
    def distance(release: str) -> tuple[int, int]:
        structs = _table()[release].structs
        sizes = (abs(len(found.data) - _end(structs[name])) for name, found in measured.items() if name in structs)
        return len(against[release].keys() & _REQUIRED.keys()), sum(sizes)

    # The nearest miss says most.
    nearest = min(against, key=distance)
    name, why = next((name, why) for name, why in against[nearest].items() if name in _REQUIRED)
    sizes = ", ".join(f"{each} {len(found.data)}" for each, found in measured.items())
    return (
        f"this libllama fits no release isolate knows (measured bytes: {sizes}; nearest is {nearest}, but in {name} {why}): "
        "pass --include the llama.h it was made from"
    )


def _common(fit: Sequence[str], table: Mapping[str, Declarations]) -> tuple[Structs, dict[tuple[str, str], str]]:
    """The newest fitting release's fields, and those of them the other fitting releases do not have in the same place."""
    fields = table[fit[0]].structs
    closed: dict[tuple[str, str], str] = {}
    for other in fit[1:]:
        for name, mine in fields.items():
            theirs = {part.name: part for part in table[other].structs.get(name, ())}
            for part in mine:
                same = theirs.get(part.name)
                if same is None:
                    closed[name, part.name] = (
                        f"{fit[0]} has it and {other} does not, and this build fits both: pass --include its llama.h"
                    )
                elif (same.offset, same.size) != (part.offset, part.size):
                    raise BuildError(
                        f"{name}.{part.name} is at byte {part.offset} in {fit[0]} and at {same.offset} in {other}, and this "
                        "libllama fits both: pass --include the llama.h it was made from"
                    )
    return fields, closed


def _common_enums(several: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """The enumerators of all, less those that two of them give another value."""
    found: dict[str, dict[str, set[int]]] = {}
    for enums in several:
        for enum, values in enums.items():
            for name, value in values.items():
                found.setdefault(enum, {}).setdefault(name, set()).add(value)
    return {
        enum: {name: next(iter(each)) for name, each in names.items() if len(each) == 1}
        for enum, names in found.items()
    }


def _layout(
    source: str, releases: tuple[str, ...], fields: Structs, enums: Mapping[str, Mapping[str, int]],
    closed: Mapping[tuple[str, str], str], measured: Mapping[str, Measured],
) -> Layout:  # fmt: skip
    structs = {name: _structure(name, parts) for name, parts in fields.items() if (name, "") not in closed}
    return Layout(source, releases, structs, fields, enums, closed, measured)


def _structure(name: str, fields: Sequence[Field]) -> type[ctypes.Structure]:
    made = type(
        name, (ctypes.Structure,), {"_fields_": [(part.name, _C.get(part.type, ctypes.c_int32)) for part in fields]}
    )
    for part in fields:
        if getattr(made, part.name).offset != part.offset:
            raise BuildError(
                f"{name}.{part.name} cannot be placed at byte {part.offset}: pass --include the build's llama.h"
            )
    return made


def _sizeof(fields: Sequence[Field]) -> int:
    alignment = max(part.size for part in fields)
    return (_end(fields) + alignment - 1) // alignment * alignment


def _end(fields: Sequence[Field]) -> int:
    """The byte after the last field: the size without the padding that follows it."""
    return fields[-1].offset + fields[-1].size


def _decode(part: Field, data: bytes) -> Value:
    (value,) = struct.unpack_from(_UNPACK.get(part.type, "<i"), data, part.offset)
    return value  # type: ignore[no-any-return]


def _span(releases: Sequence[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[-1]} to {releases[0]}"


@cache
def _table() -> dict[str, Declarations]:
    """The generated table: release -> its declarations, the newest first."""
    raw = json.loads(_TABLE.read_text())
    structs: dict[str, dict[str, tuple[Field, ...]]] = {release: {} for release in raw["releases"]}
    enums: dict[str, dict[str, dict[str, int]]] = {release: {} for release in raw["releases"]}
    for name, variants in raw["structs"].items():
        for variant in variants:
            fields = tuple(Field(*part) for part in variant["fields"])
            for release in variant["releases"]:
                structs[release][name] = fields
    for name, variants in raw["enums"].items():
        for variant in variants:
            for release in variant["releases"]:
                enums[release][name] = variant["values"]
    return {release: Declarations(structs[release], enums[release]) for release in raw["releases"]}


@cache
def _known_defaults() -> dict[str, dict[str, set[Value]]]:
    """Struct -> field -> every default a release gave it; only fields whose default each release states."""
    known: dict[str, dict[str, set[Value]]] = {}
    for name, part in _all_fields():
        if part.default is not None:
            known.setdefault(name, {}).setdefault(part.name, set()).add(part.default)
    return known


def _all_fields() -> Iterator[tuple[str, Field]]:
    for declared in _table().values():
        for name, fields in declared.structs.items():
            for part in fields:
                yield name, part
