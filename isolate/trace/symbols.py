"""Which functions a library imports and which it offers, from its dynamic symbol table (System V ABI, GNU versioning)."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from isolate.errors import BuildError
from isolate.trace.fatbin import Section, sections

_SYMBOL = struct.Struct("<IBBHQQ")
_NEED = struct.Struct("<HHIII")  # version, auxiliaries, file, first auxiliary, next
_AUXILIARY = struct.Struct("<IHHII")  # hash, flags, number, name, next


def imports(library: Path) -> dict[str, str]:
    """Names a library expects others to define -> the version it asks for ("libcudart.so.13"), "" where none."""
    return {name: version for name, version, defined in _symbols(library) if not defined}


def exports(library: Path) -> set[str]:
    """Names a library defines for others."""
    return {name for name, _, defined in _symbols(library) if defined}


def _symbols(library: Path) -> list[tuple[str, str, bool]]:
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            return _parse(view, {section.name: section for section in sections(view, str(library))})
    except OSError as error:
        raise BuildError(f"{library} cannot be read: {error.strerror or error}") from error
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise BuildError(f"{library} is damaged: its symbol table is cut short") from error


def _parse(view: memoryview, found: dict[str, Section]) -> list[tuple[str, str, bool]]:
    table, strings = found.get(".dynsym"), found.get(".dynstr")
    if table is None or strings is None:
        return []
    text = bytes(view[strings.offset : strings.offset + strings.size])
    names = _versions(view, found.get(".gnu.version_r"), text)
    numbers = found.get(".gnu.version")
    symbols = []
    for number in range(1, table.size // _SYMBOL.size):
        name, _, _, section, _, _ = _SYMBOL.unpack_from(view, table.offset + number * _SYMBOL.size)
        version = struct.unpack_from("<H", view, numbers.offset + 2 * number)[0] & 0x7FFF if numbers else 0
        symbols.append((_text(text, name), names.get(version, ""), section != 0))
    return symbols


def _versions(view: memoryview, needs: Section | None, text: bytes) -> dict[int, str]:
    """Version number -> its name, of the versions that the library asks of others."""
    names: dict[int, str] = {}
    position = needs.offset if needs else 0
    end = needs.offset + needs.size if needs else 0
    while position < end:
        _, count, _, first, step = _NEED.unpack_from(view, position)
        auxiliary = position + first
        for _ in range(count):
            _, _, number, name, more = _AUXILIARY.unpack_from(view, auxiliary)
            names[number] = _text(text, name)
            auxiliary += more
        if step == 0:
            break
        position += step
    return names


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode(errors="replace")
