"""The catalogue of GPUs: the limits that decide whether a launch is refused, each with its source (gpus.json).

A GPU that is not in it is described by a JSON file of one entry: `name`, `capability`, `processors`, `memory_mib`, and
`limits` where its compute capability is not in the catalogue.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from isolate import files
from isolate.errors import DeviceError

#: What a process's context takes of a device's memory before anything is allocated. Measured on an H200 with driver 580;
#: for others it is an assumption.
CONTEXT_MIB = 527
#: Of a file that describes a GPU.
MAX_FILE_BYTES = 1 << 20


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all GPUs of one compute capability have in common; sizes are bytes, a processor is a multiprocessor."""

    threads_per_processor: int
    blocks_per_processor: int
    registers_per_processor: int
    registers_per_block: int
    shared_per_processor: int
    #: without and with `cudaFuncSetAttribute`
    shared_per_block: int
    shared_per_block_optin: int
    #: kept by the driver of every block
    shared_reserved: int
    cluster_launch: bool
    source: str = ""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of GPU."""

    #: as cudaDeviceProp.name has it
    name: str
    #: 90 for 9.0
    capability: int
    #: multiprocessors
    processors: int
    #: cudaDeviceProp.totalGlobalMem, which is less than what is sold
    memory_mib: int
    integrated: bool = False
    peer_access: bool = False
    limits: Limits | None = None
    #: field -> where its value is from
    source: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not (10 <= self.capability < 1000 and 0 < self.processors < 100_000 and 0 < self.memory_mib < 1 << 30):
            raise ValueError("capability, processors and memory_mib are positive, capability is 90 for 9.0")
        limits = self.limits
        if limits is not None and not (
            0 < limits.shared_per_block <= limits.shared_per_block_optin <= limits.shared_per_processor < 1 << 30
            and 32 <= limits.threads_per_processor < 1 << 20
            and 0 < limits.blocks_per_processor < 1 << 20
            and 0 < limits.registers_per_block <= limits.registers_per_processor < 1 << 30
            and 0 <= limits.shared_reserved < limits.shared_per_processor
        ):
            raise ValueError("the limits contradict each other")


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capabilities: dict[str, Limits]
    gpus: dict[str, Gpu]


@cache
def _catalogue() -> _Catalogue:
    return msgspec.json.decode((Path(__file__).parent / "gpus.json").read_bytes(), type=_Catalogue)


def names() -> tuple[str, ...]:
    """The GPUs of the catalogue, in its order."""
    return tuple(_catalogue().gpus)


def find(name: str) -> Gpu:
    """The GPU of that name, or of that JSON file, with its limits filled in. DeviceError says what there is."""
    catalogue = _catalogue()
    if name.endswith(".json"):
        gpu = _read(Path(name))
    elif name.lower() in catalogue.gpus:
        gpu = catalogue.gpus[name.lower()]
    else:
        raise DeviceError(
            f"no GPU is called {name!r}; there are {', '.join(names())}, or a .json file that describes one"
        )
    if gpu.limits is not None:
        return gpu
    limits = catalogue.capabilities.get(str(gpu.capability))
    if limits is None:
        raise DeviceError(
            f"{name}: the limits of compute capability {text(gpu.capability)} are not known, its file must have `limits`"
        )
    return msgspec.structs.replace(gpu, limits=limits)


def find_all(text: str) -> tuple[Gpu, ...]:
    """The GPUs of one machine: names with commas between, `h200,h200` for two of them."""
    return tuple(find(name.strip()) for name in text.split(","))


def save(gpu: Gpu, path: Path) -> None:
    """Write a file that `find` reads. DeviceError where it cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(gpu), indent=2) + b"\n")
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror or error}") from error


def text(capability: int) -> str:
    """90 as 9.0."""
    return f"{capability // 10}.{capability % 10}"


def _read(path: Path) -> Gpu:
    try:
        return msgspec.json.decode(files.read(path, MAX_FILE_BYTES), type=Gpu)
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise DeviceError(f"{path} does not describe a GPU: {error}") from error
