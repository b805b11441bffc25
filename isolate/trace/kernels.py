"""The kernel table: every kernel in a CUDA library, what each compiled version of it allows, and which one a GPU runs.

    table = read(Path("libggml-cuda.so"))        # a few seconds once, then from the cache
    for kernel in table.kernels:
        code = select(kernel, 90)                # what an H200 runs, or None: "no kernel image"
        if code is not None:
            print(kernel.name, code, code.bounds.most_threads)

Nothing is loaded or executed, so any process may do this. Tables are cached by the library's build id, size and time.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from pathlib import Path

import msgspec

from isolate import files
from isolate.errors import BuildError
from isolate.library.elf import ElfError, read_elf
from isolate.trace import cubin, fatbin, ptx
from isolate.trace.bounds import Bounds

#: Part of a cached table's name: a change of what is read, or of how it is kept, makes the old ones unused.
FORMAT = 2

#: Compute capabilities of Jetson boards. "Binary compatibility is supported only for the desktop", CUDA C++ Programming
#: Guide 12.9, 3.1.2: they run machine code made for exactly them, and nobody else runs theirs.
JETSON = frozenset({53, 62, 72, 87, 101, 110})


class Code(msgspec.Struct, frozen=True, omit_defaults=True):
    """One compiled version of a kernel."""

    #: "ptx": text, compiled by the driver for the GPU at hand; "cubin": machine code
    kind: str
    #: 80 for compute capability 8.0
    architecture: int
    #: "a": this architecture alone; "f": it and later ones of its family
    variant: str
    #: the architecture the source was compiled for, as its `__CUDA_ARCH__` said
    compiled_for: int
    bounds: Bounds

    def __str__(self) -> str:
        return f"{'compute' if self.kind == 'ptx' else 'sm'}_{self.architecture}{self.variant}"

    def runs_on(self, capability: int) -> bool:
        """Whether a device of compute capability `capability` (90 for 9.0) can run it.

        CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility", "Family-Specific Features".
        """
        if self.variant == "a" or (self.kind == "cubin" and {capability, self.architecture} & JETSON):
            return self.architecture == capability
        if self.variant == "f" or self.kind == "cubin":
            return self.architecture // 10 == capability // 10 and self.architecture <= capability
        return self.architecture <= capability


class Kernel(msgspec.Struct, frozen=True):
    """A kernel of one translation unit, and its compiled versions in the library's order."""

    #: as the linker knows it; not unique: a template may be in several translation units
    name: str
    #: the translation unit: the address of its fat binary in the library, less the load address
    container: int
    codes: tuple[Code, ...]


class Table(msgspec.Struct, frozen=True):
    """The kernels of one library."""

    library: str
    #: its build id, or a digest of its content
    build_id: str
    kernels: tuple[Kernel, ...]


def select(kernel: Kernel, capability: int) -> Code | None:
    """The code a device of compute capability `capability` (90 for 9.0) runs; None where it refuses: no kernel image.

    Machine code of its major version with the highest minor one not above its own, else the highest PTX not above it.
    """
    fitting = [code for code in kernel.codes if code.runs_on(capability)]
    return max(fitting, key=lambda code: (code.kind == "cubin", code.architecture, code.variant), default=None)


def read(library: Path) -> Table:
    """The kernel table of a library, from the cache or by reading its fat binaries; no kernels where it has none.

    BuildError where the file cannot be read, is damaged, or would unpack to more than is allowed.
    """
    name = f"{identity(library)}-{FORMAT}.msgpack"
    found = _kept(files.cache_folder("kernels") / name)
    if found is None:
        try:
            found = _parse(library)
        except OSError as error:
            raise _unreadable(library, error) from error
        _keep(name, found)
    return Table(str(library), build_id(library), found)


def identity(library: Path) -> str:
    """What a cache knows a library by; its build id alone is also that of a damaged copy. BuildError as `build_id`."""
    found = build_id(library)
    try:
        state = library.stat()
    except OSError as error:
        raise _unreadable(library, error) from error
    return f"{found}-{state.st_size:x}-{state.st_mtime_ns:x}"


def build_id(library: Path) -> str:
    """The build id that the linker wrote, else a digest of the file. BuildError where it is not a library."""
    try:
        named = read_elf(library).build_id
        if named is not None:
            return named
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return hashlib.blake2b(data, digest_size=20).hexdigest()
    except ElfError as error:
        raise BuildError(f"{library} is {error}, not a CUDA library") from error
    except OSError as error:
        raise _unreadable(library, error) from error


def _unreadable(library: Path, error: OSError) -> BuildError:
    return BuildError(f"{library} cannot be read: {error.strerror or error}")


def _parse(library: Path) -> tuple[Kernel, ...]:
    what = str(library)
    codes: dict[tuple[int, str], list[Code]] = {}
    with (
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        for entry in fatbin.entries(view, what):
            try:
                plain = fatbin.unpack(entry, what)
            finally:
                entry.payload.release()
            if entry.kind == "ptx":
                bounds, compiled_for = ptx.kernels(plain, what), entry.architecture
            else:
                bounds = cubin.kernels(plain, what, entry.architecture)
                compiled_for = cubin.compiled_for(plain, what, entry.architecture)
            for kernel in bounds:
                code = Code(entry.kind, entry.architecture, entry.variant, compiled_for, kernel)
                codes.setdefault((entry.container, kernel.name), []).append(code)
    return tuple(Kernel(name, container, tuple(versions)) for (container, name), versions in codes.items())


def _kept(path: Path) -> tuple[Kernel, ...] | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=tuple[Kernel, ...])
    except (OSError, msgspec.DecodeError):
        # none yet, or not one of ours: it is made again
        return None


def _keep(name: str, kernels: tuple[Kernel, ...]) -> None:
    def write(path: Path) -> str:
        path.write_bytes(msgspec.msgpack.encode(kernels))
        return name

    # A cache that cannot be written costs time, nothing else.
    folder = files.cache_folder("kernels")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        files.appear(folder, write)
