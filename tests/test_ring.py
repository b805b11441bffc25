"""The trace: what a child wrote is there however it ended, and nothing in a damaged file is believed."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from isolate.errors import TraceError
from isolate.trace import ring
from isolate.trace.record import Kind, LaunchDetail
from isolate.trace.ring import Ring
from tests.compile import build

RECORD_BYTES = 168

CHILD = """
import os, signal, sys
from isolate.trace.ring import Writer
writer = Writer(sys.argv[1], int(sys.argv[2]), 1 << 16)
writer.step_end(writer.step_begin(-1, "load"))
writer.library.isolate_on_abort(b"in an earlier case")
writer.restart()
for step in range(int(sys.argv[3])):
    number = writer.step_begin(step, f"kind-{step % 3}")
    if step < int(sys.argv[3]) - 1:
        writer.step_end(number, step % 5)
os.kill(os.getpid(), int(sys.argv[4]))
"""

TIMES = """
import sys, time
from isolate.trace.ring import Writer
writer = Writer(sys.argv[1])
start = time.monotonic_ns()
while (before := time.monotonic_ns()) < start + 50_000_000:
    number = writer.step_begin(0, "step")
    between = time.monotonic_ns()
    writer.step_end(number)
    print(before, between, time.monotonic_ns())
"""


def write(
    path: str | Path, steps: int, capacity: int = 64, number: int = signal.SIGKILL, fd: int | None = None
) -> None:
    """A child writes steps, the last of which does not return, and dies of a signal."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(capacity), str(steps), str(int(number))],
        pass_fds=() if fd is None else (fd,),
        check=False,
    )
    assert done.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_what_a_dead_child_wrote_is_there(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "trace", 5, number=number)
    with Ring(tmp_path / "trace") as trace:
        records = list(trace.records())
        assert [record.step for record in records] == [0, 1, 2, 3, 4]
        assert [record.call for record in records] == ["kind-0", "kind-1", "kind-2", "kind-0", "kind-1"]
        assert [record.done for record in records] == [True, True, True, True, False]
        assert [record.code for record in records] == [0, 1, 2, 3, 0]
        assert trace.in_flight() == ("kind-1", 4)
        assert trace.progress == 2 + 9
        assert all(record.end_ns >= record.begin_ns > 0 for record in records[:-1])
        assert trace.last(Kind.STEP) == records[-1]
        assert trace.last(Kind.NODE) is None
        assert trace.abort_text == ""


def test_a_record_holds_when_its_call_began_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TIMES, str(tmp_path / "trace")]
    printed = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    slack = 20_000  # nanoseconds, where a look at the clock is interrupted
    with Ring(tmp_path / "trace") as trace:
        for record, line in zip(trace.records(), printed.splitlines(), strict=True):
            before, between, after = map(int, line.split())
            assert before - slack <= record.begin_ns <= between + slack
            assert between - slack <= record.end_ns <= after + slack


def test_an_anonymous_trace_is_read_while_nothing_and_after_something_was_written() -> None:
    fd = Ring.create_anonymous(64, 1 << 16)
    try:
        trace = Ring(fd)
        assert (trace.in_flight(), trace.progress, trace.launches, trace.abort_text) == (("bind", -1), 0, 0, "")
        assert list(trace.records()) == []
        assert trace.failures() == []
        write(f"/proc/self/fd/{fd}", 3, fd=fd)
        assert [record.step for record in trace.records()] == [0, 1, 2]
        write(f"/proc/self/fd/{fd}", 2, fd=fd)  # a second child starts with an empty trace
        assert [record.step for record in Ring(fd).records()] == [0, 1]
        with pytest.raises(OSError):
            os.ftruncate(fd, 10)
    finally:
        os.close(fd)


def test_a_wrapped_ring_keeps_the_newest(tmp_path: Path) -> None:
    write(tmp_path / "trace", 1000, capacity=64)
    with Ring(tmp_path / "trace") as trace:
        assert [record.step for record in trace.records()] == list(range(936, 1000))
        assert [record.number for record in trace.latest()] == list(range(1000, 936, -1))
        assert trace.begun == 1001


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, 4)
    raw = bytearray(path.read_bytes())
    place = ring.HEADER_BYTES + (1 << 16)
    struct.pack_into("<Q", raw, place + 2 * RECORD_BYTES, (1 << 64) - 1)  # being filled
    struct.pack_into("<Q", raw, place + 3 * RECORD_BYTES, 1 << 63 | 4)  # its end being written
    path.write_bytes(raw)
    with Ring(path) as trace:
        assert [(record.step, record.done) for record in trace.records()] == [(0, True), (2, False), (3, False)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GGUF" + bytes(100000), "is not a trace of isolate"),
        (b"ISOTRACE", "is not a trace of isolate"),
        (b"ISOTRACE" + struct.pack("<5I", 99, 32768, 168, 64, 4096) + bytes(100000), "version 99"),
        (b"ISOTRACE" + struct.pack("<5I", 1, 32768, 168, 65536, 1 << 22) + bytes(100000), "is cut short"),
        (b"ISOTRACE" + struct.pack("<5I", 1, 32768, 168, 0, 4096) + bytes(100000), "is cut short or damaged"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(TraceError, match=words) as refused:
        Ring(tmp_path / "trace")
    assert str(tmp_path / "trace") in refused.value.message


def test_a_trace_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, 4)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceError, match="is cut short"):
        Ring(path)
    with pytest.raises(TraceError, match="cannot be read"):
        Ring(tmp_path / "none")


def test_a_damaged_trace_is_read_without_an_exception(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, 200)
    whole = path.read_bytes()
    chance = random.Random(1)
    for _ in range(200):
        raw = bytearray(whole)
        for _ in range(300):  # behind the sizes, where every word is the child's
            raw[chance.randrange(28, len(raw))] = chance.randrange(256)
        for offset in range(ring.HEADER_BYTES - 16384, ring.HEADER_BYTES, 8):
            struct.pack_into("<Q", raw, offset, chance.choice([0, 1, 1 << 63, (1 << 64) - 1, chance.getrandbits(64)]))
        path.write_bytes(raw)
        with Ring(path) as trace:
            for record in [*trace.records(), *(failure.record for failure in trace.failures())]:
                assert isinstance(record.call, str)


def test_the_writer_refuses_what_it_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written: No such file or directory"):
        ring.Writer(tmp_path / "none" / "trace")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("capacity", [64, 65536])
def test_many_threads_never_mix_records(tmp_path: Path, sanitizer: str, capacity: int) -> None:
    threads, turns = 8, 2000
    sources = ["tests/native/ring_threads.c", "native/ring.c"]
    program = build(tmp_path / "threads", sources, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    path = tmp_path / "trace"
    # Some kernels place memory where older sanitizers do not expect it: no randomization.
    subprocess.run(
        ["setarch", "-R", program, path, str(capacity), str(threads), str(turns)],
        check=True,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    with Ring(path) as trace:
        assert trace.begun == trace.launches == threads * turns
        records = list(trace.records())
        if capacity > threads * turns:
            assert len(records) == threads * turns
            assert trace.lost == 0
            assert sorted(record.launch for record in records) == list(range(1, threads * turns + 1))
            assert Counter(record.stream for record in records) == dict.fromkeys(range(threads), turns)
        assert len(records) > capacity // 2 or len(records) == threads * turns
        order = defaultdict(list)
        for record in records:
            assert isinstance(record.detail, LaunchDetail)
            turn = record.detail.grid[0]
            assert record.device == record.stream
            assert record.detail.shared == record.detail.function == record.stream * 1000000 + turn
            assert (record.call, record.name) == ("launch", f"kernel-{record.stream}-{turn % 7}")
            assert record.code == (record.stream + 1 if turn % 100 == 99 and record.done else 0)
            order[record.thread, record.stream].append(turn)
        assert len(order) <= threads
        assert all(turns == sorted(turns) for turns in order.values())
        failures = trace.failures()
        assert trace.failed == threads * turns // 100
        assert 16 <= len(failures) <= 32
        assert all(failure.attributes == {"registers": failure.record.stream} for failure in failures)
        assert all(failure.record.code == failure.record.stream + 1 for failure in failures)
