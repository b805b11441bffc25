"""Fat binaries for tests, made without a CUDA toolkit: PTX that a real driver compiles, and cubins that only look like one."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lz4.block
import zstandard

from tests.compile import COMPILER, ROOT

ZSTD, LZ4 = 0x8000, 0x2000
_VARIANTS = {"": 0, "a": 0x100000, "f": 0x200000}


@dataclass(frozen=True)
class Entry:
    """One compiled version of a translation unit."""

    kind: str
    architecture: int
    content: bytes
    variant: str = ""
    packing: int = 0

    def bytes(self) -> bytes:
        """Header and payload, as nvcc 13 lays them out."""
        packed = self.content
        if self.packing == ZSTD:
            packed = zstandard.ZstdCompressor().compress(self.content)
        elif self.packing == LZ4:
            packed = lz4.block.compress(self.content, store_size=False)
        payload = packed + bytes(-len(packed) % 8)
        plain = len(self.content) if self.packing else 0
        flags = 0x11 | self.packing | _VARIANTS[self.variant]
        # A driver looks for the options of a PTX entry: where they are, and how long; here none.
        options = struct.pack("<QQ", 72, 0) if self.kind == "ptx" else b""
        header = struct.pack(
            "<HHIQIIIIQQQQ",
            1 if self.kind == "ptx" else 2,
            0x101,
            64 + len(options),
            len(payload),
            len(packed) if self.packing else 0,
            64 if options else 0,
            0x90000,
            self.architecture,
            0,
            flags,
            0,
            plain,
        )
        return header + options + payload


def container(entries: Sequence[Entry]) -> bytes:
    """A fat binary: one translation unit in several versions."""
    body = b"".join(entry.bytes() for entry in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def ptx(kernels: dict[str, str], target: str = "sm_80", before: str = "") -> bytes:
    """A PTX text. kernels: name -> directives, and after a `|` the statements of the body."""
    text = f".version 8.0\n.target {target}\n.address_size 64\n\n{before}\n"
    for name, wanted in kernels.items():
        directives, _, body = wanted.partition("|")
        text += f".visible .entry {name}(\n\t.param .u64 {name}_param_0\n)\n{directives.strip()}\n{{\n{body}\n\tret;\n\n}}\n"
    return text.encode() + b"\0"


def shared(size: int, name: str) -> str:
    """Statements that use `size` bytes of static shared memory, so that no compiler drops them."""
    return (
        f"\t.reg .b32 %r<3>;\n\t// demoted variable\n\t.shared .align 4 .b8 {name}[{size}];\n"
        f"\tmov.u32 %r1, {name};\n\tmov.u32 %r2, %tid.x;\n\tst.volatile.shared.u32 [%r1], %r2;\n"
    )


def cubin(architecture: int, kernels: dict[str, dict[str, object]], compiled_for: int | None = None) -> bytes:
    """An ELF file with the sections that describe kernels. values: threads, required, cluster, registers, shared, parameters."""
    sections: list[tuple[str, int, bytes, int]] = []
    strings = b"\0"
    symbols = bytes(24)
    info = b""
    for number, (name, values) in enumerate(kernels.items(), 1):
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 1, 0, 0)
        strings += name.encode() + b"\0"
        info += struct.pack("<BBHII", 4, 0x2F, 8, number, values.get("registers", 8))
        own = struct.pack("<BBI", 3, 0x1B, 255)[:4]
        for key, attribute in (("threads", 0x05), ("required", 0x10), ("cluster", 0x3D)):
            if key in values:
                own += struct.pack("<BBHIII", 4, attribute, 12, *values[key])  # type: ignore[misc]
        for ordinal, size in enumerate(values.get("parameters", ())):  # type: ignore[arg-type, var-annotated]
            own += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, 8 * ordinal, size << 18)
        sections.append((f".nv.info.{name}", 0x70000000, own, len(own)))
        size = int(values.get("shared", 0)) + (1024 if architecture >= 90 else 0)  # type: ignore[call-overload]
        sections.append((f".nv.shared.{name}", 8, b"", size))
    sections += [(".strtab", 3, strings, len(strings)), (".symtab", 2, symbols, len(symbols))]
    sections.append((".nv.info", 0x70000000, info, len(info)))
    note = struct.pack("<III12sHH4x", 12, 8, 1000, b"NVIDIA Corp", 2, compiled_for or architecture)
    sections.append((".note.nv.cuinfo", 7, note, len(note)))
    return elf(sections)


def elf(sections: Sequence[tuple[str, int, bytes, int]]) -> bytes:
    """A 64-bit ELF file of these sections: name, kind, content, size."""
    names = b"\0"
    rows = [bytes(64)]
    body = b""
    for name, kind, content, size in [*sections, (".shstrtab", 3, b"", 0)]:
        place = len(names)
        names += name.encode() + b"\0"
        rows.append(struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, 64 + len(body), size, 0, 0, 1, 0))
        body += content
    rows[-1] = rows[-1][:32] + struct.pack("<Q", len(names)) + rows[-1][40:]
    body += names
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(rows), len(rows) - 1)
    )
    return head + body + b"".join(rows)


def build(output: Path, fatbins: Sequence[bytes], source: str | None, *flags: str) -> Path:
    """A program (or with -shared a library) that holds fat binaries in .nv_fatbin, listed in `client_fatbins`."""
    text = '.section .nv_fatbin,"a"\n'
    for number, fatbin in enumerate(fatbins):
        path = output.with_suffix(f".{number}.fatbin")
        path.write_bytes(fatbin)
        text += f'.balign 8\nfatbin{number}:\n.incbin "{path}"\n'
    text += '.section .data.rel.ro,"aw"\n.balign 8\n.globl client_fatbins\nclient_fatbins:\n'
    text += "".join(f".quad fatbin{number}\n" for number in range(len(fatbins))) + ".quad 0\n"
    assembly = output.with_suffix(".s")
    assembly.write_text(text + '.section .note.GNU-stack,"",%progbits\n')
    sources = [str(assembly), *([str(source)] if source else [])]
    command = [
        COMPILER,
        "-std=c11",
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT / 'native'}",
        *sources,
        "-o",
        str(output),
    ]
    subprocess.run([*command, *flags, "-ldl"], check=True)
    return output
