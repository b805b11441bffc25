"""Which call failed (the origin), and which merely noticed (the report).

An error of the CUDA runtime stays until somebody asks for it: `cudaGetLastError` after a launch may speak of a call
made long before. An error of the device shows at whatever call synchronizes next, and at every call from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

from isolate.trace.record import Failure, Kind, Record
from isolate.trace.ring import Ring

#: They say what the last error was and never fail themselves.
MESSENGERS = frozenset({"cudaGetLastError", "cudaPeekAtLastError"})
#: Records of isolate's own; the code of a step is no error.
NOT_CUDA = frozenset({Kind.STEP, Kind.NODE, Kind.NOTE})
#: Errors that a kernel causes while it runs, after its launch returned (CUDA Runtime API, cudaError): they stay.
ASYNCHRONOUS = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
#: Errors that a capture gets from what was called during it.
SPOILT_CAPTURE = frozenset({901, 904, 905, 906, 907})


@dataclass(frozen=True)
class Origin:
    """What the trace says of a CUDA, driver or cuBLAS error."""

    #: the call that failed; None: a call that no hook covers, made before `report`
    origin: Record | None
    #: what the hooks read there
    failure: Failure | None
    #: the call that noticed
    report: Record
    code: int
    #: False: the device failed some time before `origin`, which is the latest it can have been
    exact: bool


def find_origin(ring: Ring) -> Origin | None:
    """The error that ended the process, or else the last one of the step in flight; None where there was none."""
    records = [record for record in ring.records() if record.kind not in NOT_CUDA]
    failures = {failure.record.number: failure for failure in ring.failures()}
    kept = {record.number for record in records}
    records = [failure.record for number, failure in failures.items() if number not in kept] + records
    if ring.abort_text:
        own = [r for r in records if r.thread == ring.abort_thread and r.number < ring.abort_record]
    else:
        own = [r for r in records if r.step == ring.step]
    report = next((r for r in reversed(own) if _error(r)), None)
    if report is None:
        return None
    code = _error(report)
    origin = report if report.kind == Kind.BLAS and report.code else _producer(records, report, code)
    if code in SPOILT_CAPTURE:
        origin = _spoiler(records, report) or origin
    exact = code not in ASYNCHRONOUS or (origin is not None and (origin.sync == code or origin.injected))
    return Origin(origin, failures.get(origin.number) if origin else None, report, code, exact)


def went_on(ring: Ring, found: Origin) -> bool:
    """The program read the error and did something about it: the thread that noticed was at work again afterwards.

    ggml so handles a CUDA graph that cannot be updated: it makes another one.
    """
    if found.code in ASYNCHRONOUS:
        return False
    work = (Kind.LAUNCH, Kind.GRAPH, Kind.COPY, Kind.SET, Kind.BLAS, Kind.SYNC)
    return any(
        record.thread == found.report.thread
        and record.number > found.report.number
        and record.kind in work
        and record.done
        and not _error(record)
        for record in ring.records()
    )


def _error(record: Record) -> int:
    return record.code or record.sync or record.after or record.before or 0


def _produces(record: Record, code: int) -> bool:
    """The error was not there before this call, and was after it. A cuBLAS status is no error of the runtime."""
    left = (record.sync, record.after) if record.kind == Kind.BLAS else (record.code, record.sync, record.after)
    return record.call not in MESSENGERS and record.before != code and code in left


def _producer(records: list[Record], report: Record, code: int) -> Record | None:
    """The call that made the error which `report` speaks of."""
    if code in ASYNCHRONOUS:  # the device is broken for every thread from the first of them on
        producers = [r for r in records if r.number <= report.number and _produces(r, code)]
        # Another thread's call that began before a launch may have ended after that launch broke the device.
        return next((r for r in producers if r.sync == code), producers[0] if producers else None)
    for record in reversed(records):
        if record.number > report.number or record.thread != report.thread:
            continue
        if _produces(record, code):
            return record
        if record.call == "cudaGetLastError" and record is not report and record.code:
            return None  # older errors were read and forgotten here
    return None


def _spoiler(records: list[Record], report: Record) -> Record | None:
    """The first call that failed in the capture which `report` ended."""
    found = None
    for record in reversed(records):
        if record.number >= report.number or record.thread != report.thread:
            continue
        if record.call == "cudaStreamBeginCapture":
            break
        if record.failed and record.call not in MESSENGERS:
            found = record
    return found
