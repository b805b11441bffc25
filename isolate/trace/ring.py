"""The trace as a file: written by a child through libisolate_trace, read by the parent while it runs and after it died.

Mirrors native/trace.h. Nothing in a trace is trusted: what does not fit is left out, and the file is read with pread,
never mapped, so that a child which cuts it short cannot take the reader with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from isolate.errors import IsolateError, TraceError
from isolate.trace.record import (
    ATTRIBUTES,
    LIMITS,
    CopyDetail,
    Detail,
    Failure,
    Kind,
    LaunchDetail,
    NodeDetail,
    Record,
)

MAGIC = b"ISOTRACE"
VERSION = 1
HEADER_BYTES = 32768
CAPACITY = 1 << 16
STRINGS_BYTES = 1 << 22

_SIZES = struct.Struct("<8s5I")  # magic, version, header_bytes, record_bytes, capacity, strings_bytes
_MODE, _NEXT, _LAUNCHES, _STRINGS_USED, _STEP, _ENDED, _LOST, _FAILED, _ABORTED = 28, 40, 48, 56, 64, 72, 80, 88, 96
_ABORT_THREAD, _ABORT_RECORD, _FIRST, _STEP_KIND, _ROUTINE = 100, 104, 128, 136, 140
_ABORT_TEXT, _ABORT_TEXT_BYTES = 144, 2048
_FAILURES, _FAILURES_OFFSET = 32, 2192
_RECORD = struct.Struct("<QIHBBQQqQQIiIIiiii80s")
_EVIDENCE = struct.Struct(f"<{_RECORD.size}s16q16q24III")
_GRID = struct.Struct("<Q4xH54xI16x3I68x")  # of a record that is a launch: state, kind, name, grid
_LAUNCH = struct.Struct("<10IQQ")
_COPY = struct.Struct("<QQQii")
_NODE = struct.Struct("<IIi4I4x4q")
_WORDS = struct.Struct("<10Q")
_COMPLETING = 1 << 63
_FILLING = (1 << 64) - 1
_CHUNK = 1024
_LONGEST_STRING = 4096


def native_library(name: str) -> Path:
    """Path of libisolate_<name>.so: beside the installed package, else in build/native of the checkout."""
    file = f"libisolate_{name}.so"
    places = [Path(__file__).resolve().parents[2] / "build" / "native" / file]
    with contextlib.suppress(metadata.PackageNotFoundError):
        places.insert(0, Path(str(metadata.distribution("isolate").locate_file(f"isolate/native/{file}"))))
    for place in places:
        if place.is_file():
            return place
    raise IsolateError(f"{file} is missing: install isolate with `pip install .`, which builds its native libraries.")


class Ring:
    """Reads a trace, from an open file descriptor (which stays the caller's) or from a path.

    A descriptor may still be empty: the child has not opened the trace yet, and everything reads as "nothing so far".
    One Ring reads one trace: after a child opened the same descriptor anew, read it with a new Ring.
    """

    def __init__(self, source: int | str | Path) -> None:
        self._owned = not isinstance(source, int)
        self._what = f"the trace of the child (descriptor {source})" if isinstance(source, int) else str(source)
        self._sizes: tuple[int, int] | None = None  # capacity, strings_bytes
        self._strings: dict[int, str] = {0: ""}
        try:
            self._file = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TraceError(f"{source} cannot be read: {error.strerror}.") from error
        if self._owned and not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise TraceError(f"{source} cannot be read: not a file.")
        try:
            if not self._opened() and self._owned:
                raise TraceError(f"{source} is empty: nothing was traced into it.")
        except TraceError:
            self.close()
            raise

    @staticmethod
    def create_anonymous(capacity: int = CAPACITY, strings_bytes: int = STRINGS_BYTES) -> int:
        """A file in memory for a child to write its trace to, inheritable; it goes away with its last descriptor.

        The child opens it by "/proc/self/fd/N" with the same sizes. Sealed: nobody can cut it short.
        """
        file = os.memfd_create("isolate-trace", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, HEADER_BYTES + strings_bytes + capacity * _RECORD.size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return file

    def close(self) -> None:
        """Closes the file where it was opened by path."""
        if self._owned and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, offset)

    def _opened(self) -> tuple[int, int] | None:
        """Capacity and size of the strings, once a child has written the header."""
        if self._sizes is None:
            head = self._read(0, _SIZES.size)
            if not head[: len(MAGIC)].strip(b"\0"):  # written last
                return None
            if len(head) < _SIZES.size or not head.startswith(MAGIC):
                raise TraceError(f"{self._what} is not a trace of isolate: `isolate run --trace FILE` writes one.")
            _, version, header_bytes, record_bytes, capacity, strings_bytes = _SIZES.unpack(head)
            if (version, header_bytes, record_bytes) != (VERSION, HEADER_BYTES, _RECORD.size):
                raise TraceError(
                    f"{self._what} is a trace of version {version} with records of {record_bytes} bytes, this isolate "
                    f"reads version {VERSION} with {_RECORD.size}: read it with the isolate that wrote it."
                )
            whole = header_bytes + strings_bytes + capacity * record_bytes
            size = os.fstat(self._file).st_size
            if capacity == 0 or capacity & (capacity - 1) or size < whole:
                raise TraceError(f"{self._what} is cut short or damaged: {size} bytes where its header says {whole}.")
            self._sizes = capacity, strings_bytes
        return self._sizes

    def _word(self, offset: int, form: str = "<Q") -> int:
        value: int = struct.unpack(form, self._read(offset, struct.calcsize(form)))[0]
        return value

    def _counter(self, offset: int) -> int:
        return self._word(offset) if self._opened() else 0

    @property
    def step(self) -> int:
        """The step in flight, -1 before the first."""
        return self._word(_STEP, "<q") if self._opened() else -1

    def in_flight(self) -> tuple[str, int]:
        """Kind and number of the step in flight; ("bind", -1) before the first: libraries are still being loaded."""
        kind = self._string(self._word(_STEP_KIND, "<I")) if self._opened() else ""
        return kind or "bind", self.step

    @property
    def routine(self) -> str:
        """The library call that the step in flight was in, "" before its first."""
        return self._string(self._word(_ROUTINE, "<I")) if self._opened() else ""

    @property
    def progress(self) -> int:
        """Changes whenever a call begins or ends."""
        return self._counter(_NEXT) + self._counter(_ENDED)

    @property
    def launches(self) -> int:
        """Kernel launches begun."""
        return self._counter(_LAUNCHES)

    @property
    def begun(self) -> int:
        """Records begun, of which the latest `capacity` are kept."""
        return self._counter(_NEXT)

    @property
    def lost(self) -> int:
        """Records dropped because another thread was in their place."""
        return self._counter(_LOST)

    @property
    def failed(self) -> int:
        """Records that failed."""
        return self._counter(_FAILED)

    @property
    def mode(self) -> int:
        """Bits of enum isolate_mode."""
        return self._word(_MODE, "<I") if self._opened() else 0

    @property
    def abort_text(self) -> str:
        """ggml's abort message, "" where it did not abort."""
        if not self._opened() or not self._word(_ABORTED, "<I"):
            return ""
        return self._read(_ABORT_TEXT, _ABORT_TEXT_BYTES).split(b"\0", 1)[0].decode("utf-8", "replace")

    @property
    def abort_thread(self) -> int:
        """Thread that aborted, 0 where none did."""
        return self._word(_ABORT_THREAD, "<I") if self.abort_text else 0

    @property
    def abort_record(self) -> int:
        """Records begun before the abort."""
        return self._counter(_ABORT_RECORD)

    def records(self) -> Iterator[Record]:
        """Oldest to newest of those kept; torn ones are left out."""
        oldest, end = self._kept()
        for first in range(oldest, end, _CHUNK):
            yield from self._chunk(first, min(first + _CHUNK, end))

    def latest(self) -> Iterator[Record]:
        """Newest to oldest of those kept."""
        oldest, end = self._kept()
        for last in range(end, oldest, -_CHUNK):
            yield from reversed(self._chunk(max(oldest, last - _CHUNK), last))

    def last(self, kind: Kind) -> Record | None:
        """The newest record of a kind."""
        return next((record for record in self.latest() if record.kind == kind), None)

    def failures(self) -> list[Failure]:
        """The first 16 and the latest 16 records that failed, oldest first."""
        if not self._opened():
            return []
        found = []
        for raw in _EVIDENCE.iter_unpack(self._read(_FAILURES_OFFSET, _FAILURES * _EVIDENCE.size)):
            record = self._record(raw[0], None)
            if record is None:
                continue
            found.append(
                Failure(
                    record=record,
                    attributes=_known(ATTRIBUTES, raw[1:17]),
                    limits=_known(LIMITS, raw[17:33]),
                    frames=tuple(self._string(offset) for offset in raw[33:57] if offset),
                    driver_log=self._string(raw[57]),
                )
            )
        return sorted(found, key=lambda failure: failure.record.number)

    def grids(self) -> set[tuple[str, tuple[int, int, int]]]:
        """Mangled name and grid of each kernel launched in the records kept, without reading the rest of them."""
        found = set()
        for first, raw in self._raw(*self._kept()):
            for number, (state, kind, name, x, y, z) in enumerate(_GRID.iter_unpack(raw), first + 1):
                if kind == Kind.LAUNCH and state & ~_COMPLETING == number:
                    found.add((name, (x, y, z)))
        return {(self._string(name), grid) for name, grid in found}

    def _kept(self) -> tuple[int, int]:
        """Numbers of the records to be found in the ring: the oldest, and one past the newest."""
        sizes = self._opened()
        if sizes is None:
            return 0, 0
        end = self.begun
        return max(0, end - sizes[0], min(end, self._counter(_FIRST))), end

    def _chunk(self, first: int, end: int) -> list[Record]:
        found = []
        for number, raw in self._raw(first, end):
            for i in range(len(raw) // _RECORD.size):
                record = self._record(raw[i * _RECORD.size : (i + 1) * _RECORD.size], number + i)
                if record is not None:
                    found.append(record)
        return found

    def _raw(self, first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Records as they lie in the file, with the number of the first: in two pieces where the ring wraps between them."""
        sizes = self._opened()
        if sizes is None:
            return
        capacity, strings_bytes = sizes
        while first < end:
            place = first % capacity
            run = min(end - first, capacity - place)
            raw = self._read(HEADER_BYTES + strings_bytes + place * _RECORD.size, run * _RECORD.size)
            yield first, raw[: len(raw) // _RECORD.size * _RECORD.size]
            first += run

    def _record(self, raw: bytes, expected: int | None) -> Record | None:
        """The record in its 168 bytes, if it is whole and the one expected there."""
        (
            state, done, kind, capturing, injected, begin_ns, end_ns, step, launch, stream, thread, device, call, name,
            code, before, after, sync, detail,
        ) = _RECORD.unpack(raw)  # fmt: skip
        number = (state & ~_COMPLETING) - 1
        if state in (0, _FILLING) or number < 0 or (expected is not None and number != expected) or not 1 <= kind <= 12:
            return None
        # A copy among the failures is made after the call, whatever its state.
        completed = bool(done) and (expected is None or not state & _COMPLETING)
        return Record(
            number=number,
            kind=Kind(kind),
            done=completed,
            capturing=bool(capturing),
            injected=bool(injected),
            begin_ns=begin_ns,
            end_ns=end_ns if completed else 0,
            step=step,
            launch=launch,
            stream=stream,
            thread=thread,
            device=device,
            call=self._string(call),
            name=self._string(name),
            code=code if completed else 0,
            before=None if before == -1 else before,
            after=None if after == -1 or not completed else after,
            sync=None if sync == -1 or not completed else sync,
            detail=self._detail(Kind(kind), detail),
        )

    def _detail(self, kind: Kind, raw: bytes) -> Detail:
        if kind == Kind.LAUNCH:
            *sizes, shared, function = _LAUNCH.unpack_from(raw)
            return LaunchDetail(
                (sizes[0], sizes[1], sizes[2]),
                (sizes[3], sizes[4], sizes[5]),
                (sizes[6], sizes[7], sizes[8]),
                shared,
                function,
            )
        if kind in (Kind.COPY, Kind.SET, Kind.MEMORY):
            return CopyDetail(*_COPY.unpack_from(raw))
        if kind == Kind.NODE:
            op, type_, index, *rest = _NODE.unpack_from(raw)
            sources = tuple(self._string(offset) for offset in rest[:4] if offset)
            return NodeDetail(index, self._string(op), self._string(type_), tuple(rest[4:]), sources)
        return _WORDS.unpack(raw)

    def _string(self, offset: int) -> str:
        sizes = self._opened()
        if offset not in self._strings and sizes is not None:
            if offset >= sizes[1]:
                return ""
            raw = self._read(HEADER_BYTES + offset, min(_LONGEST_STRING, sizes[1] - offset))
            self._strings[offset] = raw.split(b"\0", 1)[0].decode("utf-8", "replace")
        return self._strings.get(offset, "")


def _known(names: tuple[str, ...], values: tuple[int, ...]) -> dict[str, int]:
    return {name: value for name, value in zip(names, values, strict=False) if value >= 0}


class Writer:
    """The child's side: loads libisolate_trace (its symbols global, before any build) and opens the trace at `path`.

    `on_abort` is for ggml_set_abort_callback; `on_log` for llama_log_set, with a file descriptor as its user data.
    """

    def __init__(self, path: str | Path, capacity: int = CAPACITY, strings_bytes: int = STRINGS_BYTES) -> None:
        self.library = ctypes.CDLL(str(native_library("trace")), mode=ctypes.RTLD_GLOBAL)
        self.library.isolate_step_begin.argtypes = [ctypes.c_int64, ctypes.c_char_p]
        self.library.isolate_step_begin.restype = ctypes.c_uint64
        self.library.isolate_step_end.argtypes = [ctypes.c_uint64, ctypes.c_int32]
        self.library.isolate_step_end.restype = None
        self.library.isolate_step_routine.argtypes = [ctypes.c_char_p]
        self.library.isolate_step_routine.restype = None
        self.library.isolate_trace_restart.restype = None
        self.library.isolate_trace_close.restype = None
        self.library.isolate_log_level.restype = None
        self.on_abort = ctypes.cast(self.library.isolate_on_abort, ctypes.c_void_p)
        self.on_log = ctypes.cast(self.library.isolate_on_log, ctypes.c_void_p)
        error = self.library.isolate_trace_open(os.fsencode(path), capacity, strings_bytes)
        if error:
            raise TraceError(f"The trace {path} cannot be written: {os.strerror(error)}.")

    def step_begin(self, index: int, kind: str) -> int:
        """Writes that a step begins; returns what `step_end` wants."""
        number: int = self.library.isolate_step_begin(index, kind.encode())
        return number

    def step_end(self, number: int, code: int = 0) -> None:
        """Writes what the step returned."""
        self.library.isolate_step_end(number, code)

    def routine(self, name: str) -> None:
        """Writes which library call the step makes now."""
        self.library.isolate_step_routine(name.encode())

    def log_level(self, level: int) -> None:
        """Lines below this ggml_log_level are dropped by `on_log`; 3 (warnings) at first."""
        self.library.isolate_log_level(level)

    def restart(self) -> None:
        """Forgets what was traced so far, for the next case: launches count from 1 again."""
        self.library.isolate_trace_restart()

    def close(self) -> None:
        """Stops tracing."""
        self.library.isolate_trace_close()
