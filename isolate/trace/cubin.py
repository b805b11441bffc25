"""The kernels of a cubin, which is an ELF file: what its `.nv.info` sections say of each.

The attributes are not documented by NVIDIA; their numbers are LLVM's and cuobjdump's, checked against what nvcc 13.0
writes for kernels of known bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from isolate.errors import BuildError
from isolate.trace.bounds import Bounds, Dimensions
from isolate.trace.fatbin import Section, sections

_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10
_FRAME, _REGISTERS = 0x11, 0x2F
_PARAMETER, _PARAMETER_LARGE = 0x17, 0x45
_CLUSTER, _MAX_CLUSTER = 0x3D, 0x3F
#: how an attribute holds its value; the other forms have 16 bits in the word itself
_SIZED = 4

_INFO, _SHARED = ".nv.info.", ".nv.shared."
#: From compute capability 9.0 on, `.nv.shared.*` counts the bytes that the driver keeps of every block.
RESERVED_SHARED = 1024


def compiled_for(data: bytes, what: str, architecture: int) -> int:
    """The compute capability whose `__CUDA_ARCH__` the source saw: 75 for `-gencode arch=compute_75,code=sm_86`."""
    for section in sections(memoryview(data), what):
        if section.name == ".note.nv.cuinfo" and section.size >= 28:
            # a note of the owner "NVIDIA Corp": two 16-bit words, a version and the architecture
            (virtual,) = struct.unpack_from("<H", data, section.offset + 26)
            return int(virtual)
    return architecture


def kernels(data: bytes, what: str, architecture: int) -> list[Bounds]:
    """The kernels of a cubin. BuildError where it is cut short."""
    view = memoryview(data)
    found = {section.name: section for section in sections(view, what)}
    try:
        names = _symbols(view, found)
        whole = found.get(".nv.info")
        per_symbol = {
            (kind, names.get(struct.unpack_from("<I", value)[0])): struct.unpack_from("<I", value, 4)[0]
            for kind, value in (_attributes(view, whole) if whole else ())
            if kind in (_FRAME, _REGISTERS)
        }
        reserved = RESERVED_SHARED if architecture >= 90 else 0
        bounds = []
        for section in found.values():
            if section.name.startswith(_INFO):
                name = section.name[len(_INFO) :]
                shared = found.get(_SHARED + name)
                bounds.append(
                    _bounds(
                        name,
                        list(_attributes(view, section)),
                        per_symbol.get((_REGISTERS, name)),
                        per_symbol.get((_FRAME, name)),
                        max(0, shared.size - reserved) if shared else 0,
                    )
                )
    except struct.error as error:
        raise BuildError(f"{what} is damaged: an attribute of a cubin is cut short") from error
    return bounds


def _symbols(data: memoryview, found: dict[str, Section]) -> dict[int, str]:
    """Symbol number -> name, of the functions."""
    table, strings = found.get(".symtab"), found.get(".strtab")
    if table is None or strings is None:
        return {}
    text = bytes(data[strings.offset : strings.offset + strings.size])
    names = {}
    for number in range(table.size // 24):
        name, info = struct.unpack_from("<IB", data, table.offset + 24 * number)
        if info & 15 == 2:
            names[number] = text[name : text.find(b"\0", name)].decode(errors="replace")
    return names


def _attributes(data: memoryview, section: Section) -> Iterator[tuple[int, bytes]]:
    position, end = section.offset, section.offset + section.size
    while position + 4 <= end:
        form, kind, word = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == _SIZED:
            if position + word > end:
                raise struct.error
            yield kind, bytes(data[position : position + word])
            position += word
        else:
            yield kind, word.to_bytes(2, "little")


def _bounds(
    name: str, attributes: list[tuple[int, bytes]], registers: int | None, frame: int | None, shared: int
) -> Bounds:
    values = dict(attributes)
    sizes: dict[int, int] = {}
    for kind, value in attributes:
        if kind == _PARAMETER:
            _, ordinal, _, packed = struct.unpack_from("<IHHI", value)
            sizes[ordinal] = packed >> 18
        elif kind == _PARAMETER_LARGE:
            _, ordinal, _, size = struct.unpack_from("<IHHH", value)
            sizes[ordinal] = size
    limit = values.get(_MAX_CLUSTER)
    return Bounds(
        name=name,
        max_threads=_dimensions(values.get(_MAX_THREADS)),
        required_threads=_dimensions(values.get(_REQUIRED_THREADS)),
        registers=registers,
        static_shared=shared,
        local=frame,
        parameters=tuple(size for _, size in sorted(sizes.items())),
        cluster=_dimensions(values.get(_CLUSTER)),
        max_cluster=struct.unpack_from("<I", limit)[0] if limit else None,
    )


def _dimensions(value: bytes | None) -> Dimensions | None:
    if value is None:
        return None
    x, y, z = struct.unpack_from("<III", value)
    return (x, y, z)
