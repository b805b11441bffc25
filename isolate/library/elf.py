"""What an ELF file says about itself, read without loading it: machine, SONAME, what it needs, where it looks, build id.

Only the program headers and the dynamic section are read (System V ABI, chapters 4 and 5). Every offset is checked
against the file's size, so a truncated or hostile file ends in `ElfError`, never in a wrong read.
"""

from __future__ import annotations

import mmap
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 14, 15, 29
_NT_GNU_BUILD_ID = 3
_ET_DYN = 3

#: e_machine -> the name `platform.machine()` gives (System V ABI's list, the ones llama.cpp is built for)
_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


class ElfError(ValueError):
    """Not a shared ELF library that can be read; the message continues "FILE is ..."."""


@dataclass(frozen=True)
class Elf:
    """What a shared library says about itself."""

    machine: str
    soname: str | None
    needed: tuple[str, ...]
    #: folders of DT_RPATH and DT_RUNPATH, `$ORIGIN` not replaced
    search: tuple[str, ...]
    #: NT_GNU_BUILD_ID, hex; None where the linker wrote none
    build_id: str | None
    #: the names of the symbols it defines or needs, and of libraries, as one block of NUL-terminated strings
    strings: bytes

    def mentions(self, symbol: str) -> bool:
        """Whether the library's dynamic string table holds this symbol's name."""
        return b"\0" + symbol.encode() + b"\0" in self.strings


def read_elf(path: Path) -> Elf:
    """Reads a shared library. `ElfError` for anything else, `OSError` where the file cannot be read."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ElfError("empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(data)
            except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
                raise ElfError("a truncated or damaged ELF file") from error


def _parse(data: mmap.mmap) -> Elf:
    if data[:4] != b"\x7fELF":
        raise ElfError(_other_format(data[:8]))
    if data[4] != 2 or data[5] != 1:
        raise ElfError("not a 64-bit little-endian ELF file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != _ET_DYN:
        raise ElfError("not a shared library")
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_bytes, entries = struct.unpack_from("<HH", data, 54)

    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    build_id: str | None = None
    for number in range(entries):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, table + number * entry_bytes)
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, size)
        elif kind == _PT_NOTE and build_id is None:
            build_id = _build_id(data, offset, size)
    if dynamic is None:
        raise ElfError("not a shared library")

    tags: list[tuple[int, int]] = []
    for position in range(dynamic[0], dynamic[0] + dynamic[1] - 15, 16):
        tag, value = struct.unpack_from("<qQ", data, position)
        if tag == 0:
            break
        tags.append((tag, value))
    last = dict(tags)
    start = _file_offset(loads, last.get(_DT_STRTAB, 0))
    strings = data[start : start + last.get(_DT_STRSZ, 0)]

    def text(offset: int) -> str:
        end = strings.find(b"\0", offset)
        if not 0 <= offset <= end:
            raise ElfError("a truncated or damaged ELF file")
        return strings[offset:end].decode()

    return Elf(
        machine=_MACHINES.get(machine, f"ELF machine {machine}"),
        soname=text(last[_DT_SONAME]) if _DT_SONAME in last else None,
        needed=tuple(text(value) for tag, value in tags if tag == _DT_NEEDED),
        search=tuple(
            folder
            for tag, value in tags
            if tag in (_DT_RPATH, _DT_RUNPATH)
            for folder in text(value).split(":")
            if folder
        ),
        build_id=build_id,
        strings=strings,
    )


def _file_offset(loads: list[tuple[int, int, int]], address: int) -> int:
    for start, offset, size in loads:
        if start <= address < start + size:
            return address - start + offset
    raise ElfError("a truncated or damaged ELF file")


def _build_id(data: mmap.mmap, offset: int, size: int) -> str | None:
    end = min(offset + size, len(data))
    while offset + 12 <= end:
        name_bytes, value_bytes, kind = struct.unpack_from("<III", data, offset)
        value = offset + 12 + (name_bytes + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID and data[offset + 12 : offset + 12 + name_bytes] == b"GNU\0":
            return data[value : value + value_bytes].hex()
        offset = value + (value_bytes + 3) // 4 * 4
    return None


def _other_format(start: bytes) -> str:
    if start.startswith(b"!<arch>"):
        return "a static archive"
    if start.startswith(b"MZ"):
        return "a Windows library"
    if start[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"):
        return "a macOS library"
    return "not an ELF file"


def this_machine() -> str:
    """The machine this process runs on, in the words of `Elf.machine`."""
    return platform.machine()
