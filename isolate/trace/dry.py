"""What a child needs so that a build's host side runs on simulated GPUs: stand-ins for CUDA's libraries, and a file that
says which GPUs there are and what each kernel of the build allows on them.

    device = prepare(gpus.find_all("h200"), [*build.ggml, build.llama])
    # the child: device.environment; loads device.before with RTLD_GLOBAL, after the hooks and before the build

Results are not computed on these devices: kernels do nothing, device memory reads as zeros.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from isolate import files
from isolate.errors import DeviceError
from isolate.library.elf import read_elf
from isolate.trace import kernels
from isolate.trace.gpus import CONTEXT_MIB, Gpu
from isolate.trace.kernels import Code, Kernel, Table
from isolate.trace.symbols import exports, imports

#: of native/dry/config.c
FORMAT = 1
#: cudaDriverGetVersion of the driver that was measured
DRIVER = 13000

_RUNTIME = re.compile(r"libcudart\.so\.\d+")
_STAND_IN = re.compile(r"lib(cudart|cublas)\.so\.\d+")
_DRIVER_CALL = re.compile(r"cu[A-Z]\w+")
#: Registers that a block can have on every GPU since compute capability 5.0.
_REGISTERS = 65536


@dataclass(frozen=True)
class DryDevice:
    """How to set up a child."""

    #: the stand-ins to load, RTLD_GLOBAL, in this order, before the build's libraries
    before: tuple[Path, ...]
    environment: dict[str, str]


def prepare(gpus: Sequence[Gpu], libraries: Iterable[Path]) -> DryDevice:
    """Simulated GPUs for a build of these libraries; those that do not use CUDA are passed over.

    DeviceError where none uses it, where they have the CUDA runtime linked in, or where they import a function that the
    stand-ins do not have. BuildError where a library is damaged.
    """
    needed = {path.resolve(): read_elf(path).needed for path in libraries}
    using = {path: names for path, names in needed.items() if any(_RUNTIME.fullmatch(name) for name in names)}
    runtimes = sorted({name for names in using.values() for name in names if _RUNTIME.fullmatch(name)})
    if len(runtimes) != 1:
        found = " and ".join(runtimes) or "no library needs libcudart"
        raise DeviceError(
            f"the dry device stands in for one shared libcudart, this build has another arrangement ({found}): pass --build a "
            "CUDA build of llama.cpp with shared libraries, made with -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared"
        )
    folder = native_folder()
    before = tuple(folder / name for name in (runtimes[0], runtimes[0].replace("cudart", "cublas"), "libcuda.so.1"))
    for path in before:
        if not path.is_file():
            there = ", ".join(sorted(other.name for other in folder.glob("libcudart.so.*")))
            raise DeviceError(f"the dry device has no {path.name}, which this build needs; it has {there}")
    check_imports(using, before)
    return DryDevice(before, {"ISOLATE_DRY": str(configuration(gpus, list(using)))})


def native_folder() -> Path:
    """Where the stand-ins are: installed with isolate, or built in a checkout. DeviceError where they are not."""
    places = [Path(__file__).parents[2] / "build" / "native" / "dry"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        places.insert(0, Path(str(metadata.distribution("isolate").locate_file("isolate/native/dry"))))
    for folder in places:
        if (folder / "libisolate_dry.so").is_file():
            return folder
    raise DeviceError(f"the dry device is not there: no libisolate_dry.so in {' or '.join(map(str, places))}")


def check_imports(libraries: Iterable[Path], stand_ins: Iterable[Path]) -> None:
    """DeviceError names the functions of CUDA that a library imports and no stand-in has."""
    offered = {name for path in stand_ins for name in exports(path)}
    for path in libraries:
        missing = [
            name
            for name, version in sorted(imports(path).items())
            if (_STAND_IN.fullmatch(version) or (not version and _DRIVER_CALL.fullmatch(name))) and name not in offered
        ]
        if missing:
            raise DeviceError(f"the dry device cannot run {path}: it has no {', '.join(missing)}")


def configuration(gpus: Sequence[Gpu], libraries: Sequence[Path]) -> Path:
    """The file for ISOLATE_DRY, from the cache or made now; see native/dry/config.c for its form.

    Kernels are known by the real path of their library. DeviceError where the file cannot be written.
    """
    real = [path.resolve() for path in libraries]
    key = hashlib.blake2b(digest_size=16)
    for part in (FORMAT, kernels.FORMAT, DRIVER, CONTEXT_MIB, [(str(path), kernels.identity(path)) for path in real]):
        key.update(repr(part).encode())
    key.update(msgspec.msgpack.encode(gpus))

    def write(path: Path) -> None:
        path.write_text("".join(f"{line}\n" for line in _lines(gpus, [kernels.read(library) for library in real])))

    folder = files.cache_folder("kernels")
    try:
        return files.kept(folder, key.hexdigest(), ".dry", write)
    except OSError as error:
        raise DeviceError(f"cannot write to {folder} what the dry device reads: {error.strerror or error}") from error


def registers(kernel: Kernel, code: Code) -> tuple[int, bool]:
    """Registers a thread, and whether that is known.

    PTX has none before the driver compiles it. The nearest machine code of the same kernel with the same bounds is taken
    instead, else the most that its launch bounds leave it, which the compiler keeps to.
    """
    bounds = code.bounds
    if bounds.registers is not None:
        return bounds.registers, True
    alike = [
        other
        for other in kernel.codes
        if other.bounds.registers is not None and other.bounds.max_threads == bounds.max_threads
    ]
    if alike:
        nearest = min(alike, key=lambda other: abs(other.architecture - code.architecture))
        assert nearest.bounds.registers is not None
        return nearest.bounds.registers, False
    most = _REGISTERS // ((bounds.most_threads or 1024) * (bounds.min_blocks or 1)) // 8 * 8
    return max(16, min(255, most, bounds.max_registers or 255)), False


def _lines(gpus: Sequence[Gpu], tables: Sequence[Table]) -> Iterator[str]:
    yield f"isolate dry device\t{FORMAT}"
    yield f"driver\t{DRIVER}"
    for gpu in gpus:
        yield from _gpu(gpu)
    for table in tables:
        yield f"library\t{table.library}"
        for capability in sorted({gpu.capability for gpu in gpus}):
            yield f"capability\t{capability}"
            for kernel in table.kernels:
                yield _kernel(kernel, capability)


def _gpu(gpu: Gpu) -> Iterator[str]:
    assert gpu.limits is not None
    yield "gpu"
    yield f"name\t{gpu.name}"
    yield f"capability\t{gpu.capability}"
    yield f"processors\t{gpu.processors}"
    yield f"memory\t{gpu.memory_mib << 20}"
    yield f"context_memory\t{CONTEXT_MIB << 20}"
    yield f"integrated\t{int(gpu.integrated)}"
    yield f"peer_access\t{int(gpu.peer_access)}"
    for name, value in msgspec.structs.asdict(gpu.limits).items():
        if name != "source":
            yield f"{name}\t{int(value)}"


def _kernel(kernel: Kernel, capability: int) -> str:
    code = kernels.select(kernel, capability)
    if code is None:
        return f"kernel\t{kernel.container}\t{kernel.name}\tnone"
    bounds = code.bounds
    binary = code.architecture if code.kind == "cubin" else capability
    count, known = registers(kernel, code)
    values = (
        code.compiled_for,
        binary,
        bounds.most_threads or 0,
        *(bounds.required_threads or (0, 0, 0)),
        count,
        int(known),
        bounds.static_shared,
        bounds.local or 0,
        *(bounds.cluster or (0, 0, 0)),
        bounds.max_cluster or 0,
    )
    return "\t".join(("kernel", str(kernel.container), kernel.name, code.kind, *map(str, values)))
