"""Fat binaries: where a CUDA library keeps its kernels, each compiled several times, as PTX text and as machine code.

The layout is not documented by NVIDIA. It was read off what nvcc 13.0 writes (`fatbinary_section.h` has the wrapper's
part) and off two released builds. A library's section `.nv_fatbin` is a row of containers, one a translation unit, each
a row of entries. Every size is checked before it is believed, and no payload is unpacked beyond a limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.block
import zstandard

from isolate.errors import BuildError

_CONTAINER_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes that follow the header
#: kind, version, header bytes, payload bytes, packed bytes, .., architecture, .., flags, .., plain bytes
_ENTRY = struct.Struct("<HHIQI8xI8xQ8xQ")
_KINDS = {1: "ptx", 2: "cubin"}
_LZ4, _ZSTD = 0x2000, 0x8000
_VARIANTS = {0: "", 0x100000: "a", 0x200000: "f"}
_VARIANT_MASK = 0x300000

#: The largest PTX file seen in a real build is 11 MB, the whole of one 1.3 GB.
MOST_BYTES_OF_AN_ENTRY = 1 << 28
MOST_BYTES_OF_A_LIBRARY = 1 << 33

_SECTION = struct.Struct("<IIQQQQIIQQ")
_WITHOUT_CONTENT = (0, 8)  # SHT_NULL, SHT_NOBITS


@dataclass(frozen=True)
class Section:
    """A section of an ELF file."""

    name: str
    kind: int
    address: int
    offset: int
    size: int


@dataclass(frozen=True)
class Entry:
    """One translation unit's kernels, compiled for one architecture."""

    #: address of the container in the library, which is what `__cudaRegisterFatBinary` is given, less the load address
    container: int
    #: "ptx" (text, compiled by the driver when it is loaded) or "cubin" (machine code)
    kind: str
    #: 80 for compute capability 8.0
    architecture: int
    #: "a": for this architecture alone; "f": for this one and later ones of its family; "": as the kind allows
    variant: str
    payload: memoryview
    packed: int
    flags: int
    plain: int


def sections(data: memoryview, what: str) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file, each inside it. BuildError where it is none or is cut short."""
    try:
        if bytes(data[:6]) != b"\x7fELF\x02\x01":
            raise BuildError(f"{what} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", data, 40)
        entry_bytes, count, names = struct.unpack_from("<HHH", data, 58)
        rows = [_SECTION.unpack_from(data, table + number * entry_bytes) for number in range(count)]
        start, length = rows[names][4:6] if count else (0, 0)
        strings = bytes(data[start : start + length])
    except (struct.error, IndexError, OverflowError) as error:
        raise BuildError(f"{what} is cut short: its section headers are beyond its end") from error
    found = []
    for place, kind, _, address, offset, size, *_ in rows:
        name = strings[place : strings.find(b"\0", place)].decode(errors="replace")
        if kind not in _WITHOUT_CONTENT and offset + size > len(data):
            raise BuildError(
                f"{what} is cut short: section {name} ends at {offset + size:#x}, the file at {len(data):#x}"
            )
        found.append(Section(name, kind, address, offset, size))
    return found


def entries(data: memoryview, what: str) -> Iterator[Entry]:
    """Every entry of every fat binary in a library, in file order; none where it has no CUDA code.

    BuildError names the offset where a container or an entry does not fit.
    """
    unpacked = 0
    for section in sections(data, what):
        if section.name != ".nv_fatbin" or section.kind in _WITHOUT_CONTENT:
            continue
        end = section.offset + section.size
        position = section.offset
        while position + _CONTAINER.size <= end:
            magic, _, header, size = _CONTAINER.unpack_from(data, position)
            if magic != _CONTAINER_MAGIC:
                position += 8  # containers are aligned, and the linker may leave a gap
                continue
            start, stop = position + header, position + header + size
            if header < _CONTAINER.size or stop > end:
                raise BuildError(
                    f"{what} is damaged: the fat binary at {position:#x} claims {size} bytes, {end - start} are left"
                )
            for entry in _container(data, what, start, stop, section.address + position - section.offset):
                unpacked += entry.plain
                if unpacked > MOST_BYTES_OF_A_LIBRARY:
                    raise BuildError(
                        f"{what} is refused: its fat binaries unpack to more than {MOST_BYTES_OF_A_LIBRARY >> 30} GiB"
                    )
                yield entry
            position = stop


def _container(data: memoryview, what: str, position: int, stop: int, address: int) -> Iterator[Entry]:
    while position + _ENTRY.size <= stop:
        kind, _, header, size, packed, architecture, flags, plain = _ENTRY.unpack_from(data, position)
        start, end = position + header, position + header + size
        if header < _ENTRY.size or end > stop or packed > size:
            raise BuildError(f"{what} is damaged: the entry at {position:#x} of a fat binary claims {size} bytes")
        plain = plain if flags & (_ZSTD | _LZ4) else size
        if plain > MOST_BYTES_OF_AN_ENTRY:
            raise BuildError(f"{what} is refused: the entry at {position:#x} claims to unpack to {plain} bytes")
        if kind in _KINDS:
            variant = _VARIANTS.get(flags & _VARIANT_MASK, "")
            payload = data[start:end]
            yield Entry(address, _KINDS[kind], architecture, variant, payload, packed, flags, plain)
        position = end


def unpack(entry: Entry, what: str) -> bytes:
    """The entry's PTX text or ELF file. BuildError where the packed data is damaged or says less than it holds."""
    try:
        if entry.flags & _ZSTD:
            with zstandard.ZstdDecompressor().stream_reader(entry.payload[: entry.packed]) as reader:
                plain = reader.read(entry.plain + 1)
        elif entry.flags & _LZ4:
            plain = lz4.block.decompress(entry.payload[: entry.packed], uncompressed_size=entry.plain)
        else:
            return bytes(entry.payload)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise BuildError(
            f"{what} is damaged: an entry of the fat binary at {entry.container:#x} does not unpack: {error}"
        ) from error
    if len(plain) != entry.plain:
        raise BuildError(
            f"{what} is damaged: an entry of the fat binary at {entry.container:#x} does not unpack to the "
            f"{entry.plain} bytes it promises"
        )
    return bytes(plain)
