"""Kernel launches out of a trace: readable names, filters, counts, and a timeline for Perfetto."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import cpp_demangle

from isolate.fault import Launch
from isolate.trace.record import CopyDetail, Failure, Kind, LaunchDetail, Record
from isolate.trace.ring import Ring

#: nvcc puts what is local to a file into a namespace of this name, with a hash that differs from build to build.
_INTERNAL = re.compile(r"_INTERNAL_[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}::")
_COPY_DIRECTIONS = {0: "host to host", 1: "host to device", 2: "device to host", 3: "device to device", 4: "default"}


@lru_cache(maxsize=16384)
def kernel_name(mangled: str) -> str:
    """A kernel's name with its template arguments, without result and parameters: the same in every build of a source."""
    try:
        name = cpp_demangle.demangle(mangled)
    except ValueError:
        return mangled
    name = _INTERNAL.sub("", name)
    depth = 0
    for place, letter in enumerate(name):
        if letter in "<([":
            # The parameters begin at the first parenthesis outside of template arguments that is not `(anonymous ...`.
            if letter == "(" and depth == 0 and not name.startswith("(anonymous", place):
                name = name[:place]
                break
            depth += 1
        elif letter in ">)]":
            depth -= 1
    return name.removeprefix("void ")


def launch_of(record: Record, failure: Failure | None = None) -> Launch | None:
    """The launch that a record is about, with what the hooks read where it failed; None for any other call."""
    detail = record.detail
    if not isinstance(detail, LaunchDetail):
        return None
    attributes: dict[str, int] = {}
    if failure is not None:
        # No kernel has 0 registers: the dry device says so where it cannot know.
        read = {name: value for name, value in failure.attributes.items() if value or name != "registers"}
        attributes = {
            **read,
            **{f"device_{name}": value for name, value in failure.limits.items()},
        }
    return Launch(
        number=record.launch,
        call=record.call,
        kernel=record.name,
        demangled=kernel_name(record.name),
        grid=detail.grid,
        block=detail.block,
        shared=detail.shared,
        device=record.device,
        stream=record.stream,
        code=record.code or record.sync or 0,
        capturing=record.capturing,
        attributes=attributes,
    )


def launches_before(ring: Ring, number: int, most: int = 20) -> tuple[Launch, ...]:
    """The last launches before record `number`, oldest first."""
    before = (
        launch for record in ring.latest() if record.number < number and (launch := launch_of(record)) is not None
    )
    return tuple(reversed(list(islice(before, most))))


def kernels_seen(ring: Ring) -> frozenset[tuple[str, int]]:
    """The kernels that were launched, each with the class of its grid: the logarithm to base 2 of its blocks, rounded down.

    Of a run of more calls than the trace keeps (65,536), the latest count.
    """
    return frozenset((kernel_name(name), (x * y * z).bit_length() - 1) for name, (x, y, z) in ring.grids())


def select(
    records: Iterable[Record], step: int | None = None, kernel: str | None = None, stream: int | None = None
) -> Iterator[Record]:
    """The records of a step, on a stream, or of kernels with `kernel` in their readable or mangled name."""
    for record in records:
        if step is not None and record.step != step:
            continue
        if stream is not None and record.stream != stream:
            continue
        if kernel is not None and (
            record.kind != Kind.LAUNCH or (kernel not in kernel_name(record.name) and kernel not in record.name)
        ):
            continue
        yield record


@dataclass(frozen=True)
class Count:
    """How often a kernel was launched, or another call made, and how long the host was in the calls."""

    name: str
    calls: int
    failed: int
    #: nanoseconds on the host; in the modes that synchronize after a launch the time on the device is in it
    host_ns: int


def counts(records: Iterable[Record]) -> list[Count]:
    """Calls by kernel, or by function where there is none; those that took longest first."""
    calls: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.kind not in (Kind.STEP, Kind.NODE, Kind.NOTE):
            calls[kernel_name(record.name) if record.kind == Kind.LAUNCH else record.call].append(record)
    found = [
        Count(
            name=name,
            calls=len(group),
            failed=sum(record.failed for record in group),
            host_ns=sum(record.end_ns - record.begin_ns for record in group if record.done),
        )
        for name, group in calls.items()
    ]
    return sorted(found, key=lambda count: (-count.host_ns, count.name))


def line(record: Record) -> str:
    """One record as one line of text."""
    parts = [f"{record.number:>7}", f"step {record.step:>3}", record.call]
    detail = record.detail
    if isinstance(detail, LaunchDetail):
        parts[2] = f"launch {record.launch} {kernel_name(record.name)} grid {_triple(detail.grid)}"
        parts[2] += f" block {_triple(detail.block)}"
        if any(detail.cluster):
            parts.append(f"cluster {_triple(detail.cluster)}")
        if detail.shared:
            parts.append(f"shared {detail.shared}")
    elif isinstance(detail, CopyDetail):
        parts.append(f"{detail.bytes} bytes")
        if record.kind == Kind.COPY:
            parts.append(_COPY_DIRECTIONS.get(detail.direction, f"direction {detail.direction}"))
    elif record.name:
        parts.append(kernel_name(record.name))
    if record.capturing:
        parts.append("capturing")
    if not record.done:
        parts.append("did not return")
    parts += [
        f"{what} {code}"
        for what, code in (("returned", record.code), ("before it", record.before), ("synchronize", record.sync))
        if code
    ]
    if record.after and record.after not in (record.code, record.before):
        parts.append(f"left behind {record.after}")
    return "  ".join(parts)


def _triple(sizes: tuple[int, int, int]) -> str:
    return ",".join(map(str, sizes))


def chrome_trace(records: Iterable[Record]) -> dict[str, Any]:
    """The trace as Chrome's JSON (Trace Event Format), for Perfetto: one row a host thread, microseconds."""
    events = []
    for record in records:
        name = kernel_name(record.name) if record.kind == Kind.LAUNCH else record.call
        if record.kind == Kind.NODE:
            name = record.name
        event: dict[str, Any] = {
            "name": name,
            "cat": record.kind.name.lower(),
            "ph": "X" if record.done else "B",
            "ts": record.begin_ns / 1000,
            "pid": record.device if record.device >= 0 else 0,
            "tid": record.thread,
            "args": {"record": record.number, "step": record.step, "stream": hex(record.stream), "text": line(record)},
        }
        if record.done:
            event["dur"] = (record.end_ns - record.begin_ns) / 1000
        events.append(event)
    return {"displayTimeUnit": "ns", "traceEvents": events}
