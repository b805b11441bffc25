"""What a trace holds: one record a call, and what the hooks read where a call failed. Mirrors native/trace.h."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class Kind(IntEnum):
    """What a record is about (enum isolate_kind)."""

    STEP = 1
    NODE = 2
    LAUNCH = 3
    GRAPH = 4
    COPY = 5
    SET = 6
    MEMORY = 7
    SYNC = 8
    STREAM = 9
    QUERY = 10
    BLAS = 11
    NOTE = 12


#: enum isolate_attribute: of a kernel, by cudaFuncGetAttributes
ATTRIBUTES = (
    "shared_static",
    "constant",
    "local",
    "max_threads",
    "registers",
    "ptx",
    "binary",
    "shared_dynamic_max",
)
#: enum isolate_limit: of a device, by cudaDeviceGetAttribute
LIMITS = (
    "max_threads",
    "block_x",
    "block_y",
    "block_z",
    "grid_x",
    "grid_y",
    "grid_z",
    "shared",
    "shared_optin",
    "registers",
    "warp",
    "major",
    "minor",
    "processors",
)


@dataclass(frozen=True)
class LaunchDetail:
    """Geometry of a launch; a cluster of zeros where none was asked for."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    #: dynamic shared memory, bytes
    shared: int
    function: int


@dataclass(frozen=True)
class CopyDetail:
    """A copy, a memset, an allocation or a free (its address is `destination`)."""

    bytes: int
    destination: int
    source: int
    #: cudaMemcpyKind, -1 where the call has none
    direction: int
    value: int


@dataclass(frozen=True)
class NodeDetail:
    """A graph node: its place in the step in order of evaluation, ne[0..3], names of its sources."""

    index: int
    op: str
    type: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]


Detail: TypeAlias = LaunchDetail | CopyDetail | NodeDetail | tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """One call, as written before it and completed after it."""

    number: int
    kind: Kind
    #: False: the process ended inside the call, or has not come back yet
    done: bool
    capturing: bool
    injected: bool
    begin_ns: int
    end_ns: int
    step: int
    #: of a launch its number, from 1; else the launches begun before
    launch: int
    stream: int
    thread: int
    device: int
    call: str
    #: the kernel (mangled), tensor or file
    name: str
    code: int
    #: cudaPeekAtLastError before and after the call, None where it was not read
    before: int | None
    after: int | None
    #: what the synchronize after it returned, None where none was made
    sync: int | None
    detail: Detail

    @property
    def failed(self) -> bool:
        """The call returned an error, left one behind, or the synchronize after it did."""
        return bool(self.code or (self.after and not self.before) or self.sync)


@dataclass(frozen=True)
class Failure:
    """A record that failed and what the hooks read there; what could not be read is missing from the dicts."""

    record: Record
    #: of the kernel: keys of ATTRIBUTES
    attributes: dict[str, int]
    #: of the device: keys of LIMITS
    limits: dict[str, int]
    #: host backtrace, innermost first: `module+0xoffset symbol`
    frames: tuple[str, ...]
    driver_log: str
