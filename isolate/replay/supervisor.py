"""The parent's side: it starts a child, gives it cases, and always comes back with an answer.

A child that does not answer is read from what it left: how it ended, what it logged, what its trace says was in flight.
The trace, the log and saved states are memory files without a name, so nothing is left behind however anybody ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import msgspec

from isolate import errors
from isolate.case import JUDGED_BY, Case, Check
from isolate.errors import BuildError, IsolateError, ModelError
from isolate.fault import Fault, StepInFlight
from isolate.replay import protocol
from isolate.replay.death import Death, fault_of, tail
from isolate.replay.target import Target, child_environment, find
from isolate.trace.explain import cuda_fault
from isolate.trace.launch import kernels_seen
from isolate.trace.node import last_node
from isolate.trace.ring import Ring

#: What ggml_abort is given for an error of CUDA, ROCm or MUSA (GGML_CUDA_NAME of ggml-cuda).
GGML_SAYS = re.compile(r"(CUDA|ROCm|MUSA) error")
#: Seconds without progress in one step after which a child is taken to hang. The first decode of a CUDA build may
#: compile its kernels for the better part of a minute.
TIMEOUT = 120.0
#: The same before the first step: a large model takes its time to load and says nothing meanwhile.
LOADING_TIMEOUT = 900.0
#: Starts the child's module without the current folder in the search path: a file that lies there is not code of ours.
START = """
import runpy, sys
if sys.path[0] == "":
    del sys.path[0]
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""
#: The longest answer that is read: a child that writes more has lost its mind.
LONGEST_REPLY = 256 << 20


@dataclass(frozen=True)
class Outcome:
    """What came of one run of a case."""

    fault: Fault | None
    #: steps that were completed
    steps: int
    seconds: float
    #: what a check could not judge, and why
    notes: tuple[str, ...] = ()


class Supervisor:
    """One child at a time on one build and target; a context manager that leaves nothing behind."""

    def __init__(
        self,
        build: str | None = None,
        include: str | None = None,
        target: Target | None = None,
        timeout: float = TIMEOUT,
        trace: Path | None = None,
        worker: str = "isolate.replay.worker",
        spare: bool = False,
    ) -> None:
        """`spare`: while one child runs a case, the next is started beside it, for callers whose children often die."""
        self.build = build
        self.include = include
        self.target = target or find("cpu")
        self.timeout = timeout
        self.trace = trace
        self.worker = worker
        self.spare = spare
        self._child: _Child | None = None
        self._next: _Child | None = None
        #: the child that had the last case, alive or not
        self._ran: _Child | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child and the one beside it, if there are any."""
        self.fresh()
        if self._next is not None:
            self._next.close()
            self._next = None

    def run(self, case: Case, check: Sequence[Check] = (), folder: Path = Path(), deep: bool = False) -> Outcome:
        """Run a case in the warm child, or in a new one when the last died.

        `folder` is where a relative model path starts. IsolateError when the case, the model or the build is not usable.
        """
        started = time.perf_counter()
        child = self._ran = self._ready()
        if self.spare and self._next is None:
            self._next = _Child(self)
        asked = list(dict.fromkeys([*case.checks(), *check]))
        reply = child.ask(protocol.RunCase(case, str(folder), asked, deep), case)
        if isinstance(reply, Fault):
            self._child = None
            return Outcome(reply, reply.step.index or 0, time.perf_counter() - started)
        assert isinstance(reply, protocol.Ran)
        return Outcome(reply.fault, reply.steps, reply.seconds, tuple(reply.notes))

    def start(self) -> None:
        """Have a child ready. IsolateError when the build or the target is not usable, whatever the case."""
        self._ready()

    def seen(self) -> frozenset[tuple[str, int]]:
        """The kernels that the last run launched, by name and class of grid (`kernels_seen`); none where nothing is hooked."""
        return self._ran.seen() if self._ran is not None else frozenset()

    def fresh(self) -> None:
        """Let the next run have a new child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def describe(self) -> dict[str, object]:
        """What the build is and has, for `isolate doctor`."""
        reply = self._ready().ask(protocol.Describe(), None)
        return self._data(reply, "being described")

    def make_model(
        self, zoo: str, quantization: str, seed: int, out: Path, layers: int | None = None, experts: int | None = None
    ) -> dict[str, object]:
        """Write a zoo model to `out`, quantized by the build."""
        request = protocol.MakeModel(zoo, quantization, seed, str(out.absolute()), layers, experts)
        reply = self._ready().ask(request, None)
        return self._data(reply, "making a model")

    def _data(self, reply: protocol.Reply | Fault, doing: str) -> dict[str, object]:
        if isinstance(reply, Fault):
            self._child = None
            raise BuildError(f"the build died while {doing}: {reply.explanation}")
        assert isinstance(reply, protocol.Answer)
        return reply.data

    def _ready(self) -> _Child:
        if self._child is None:
            child, self._next = self._next or _Child(self), None
            try:
                reply = child.await_reply(None)
            except BaseException:
                child.close()
                raise
            if isinstance(reply, Fault):
                last = f" ({reply.log[-1]})" if reply.log else ""
                raise BuildError(f"the build died while it was loaded: {reply.explanation}{last}")
            self._child = child
        return self._child


class _Child:
    """A running child and what it writes to."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.timeout = supervisor.timeout
        self.hooked = supervisor.target.hooked
        # Only here, where nobody can cut it short or fill its disk, is the trace written; a file gets a copy at the end.
        self.keep = _writable(supervisor.trace) if supervisor.trace else None
        self.trace = Ring.create_anonymous()
        self.log = os.memfd_create("isolate-log")
        fcntl.fcntl(self.log, fcntl.F_SETFL, os.O_APPEND)
        self.socket, theirs = socket.socketpair()
        self.unread = b""
        setup = {
            "build": supervisor.build,
            "include": supervisor.include,
            "before": [str(path) for path in supervisor.target.before],
            "gpu_layers": supervisor.target.gpu_layers,
            "computes": supervisor.target.computes,
            "modes": supervisor.target.modes,
            "window": supervisor.target.window,
            "socket": theirs.fileno(),
            "trace": self.trace,
            "log": self.log,
            "parent": os.getpid(),
        }
        self.ooms = _oom_kills()
        with theirs:
            # In a session of its own: Ctrl-C at the terminal is for the parent, which then ends the child.
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, supervisor.worker, msgspec.json.encode(setup).decode()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=(theirs.fileno(), self.trace, self.log),
                env=child_environment(supervisor.target),
                start_new_session=True,
            )
        # Says that the child ended even when somebody else still holds its socket.
        self.ended = os.pidfd_open(self.process.pid)
        self.ring: Ring | None = None
        self.deep = False
        self.launched: frozenset[tuple[str, int]] = frozenset()

    def ask(self, request: protocol.Request, case: Case | None) -> protocol.Reply | Fault:
        """Send a request and wait for the answer, or for the fault that stands for it."""
        os.ftruncate(self.log, 0)
        self.ooms = _oom_kills()
        self.deep = isinstance(request, protocol.RunCase) and request.deep
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(protocol.encode(request))
        return self.await_reply(case)

    def await_reply(self, case: Case | None) -> protocol.Reply | Fault:
        """Wait for an answer; IsolateError when the child refuses, a Fault when it ended or hangs."""
        timeout = None
        line = b""
        try:
            line = self._line()
        except TimeoutError:
            timeout = self.timeout
        except ConnectionResetError:
            pass
        try:
            reply = protocol.decode_reply(line)
        except msgspec.DecodeError:
            # Nothing, or what no worker of ours says: the build has the process.
            return self._death(timeout, case)
        if isinstance(reply, protocol.Refused):
            raise _refusal(reply, self.log_text(), self._failed_call())
        if isinstance(reply, protocol.Ran) and reply.fault is not None:
            reply.fault = self._located(replace(reply.fault, log=tail(self.log_text())))
        return reply

    def _line(self) -> bytes:
        """The next answer; nothing when the child ended first. TimeoutError after too long without progress in the trace."""
        pause = min(self.timeout / 4, 0.5)
        seen, since = -1, time.monotonic()
        while b"\n" not in self.unread:
            ready = select.select([self.socket.fileno(), self.ended], [], [], pause)[0]
            if self.socket.fileno() in ready:
                more = self.socket.recv(1 << 20)
                self.unread += more
                if not more or len(self.unread) > LONGEST_REPLY:
                    return b""
            elif ready:
                return b""
            ring = self._ring()
            progress = ring.progress if ring else 0
            limit = self.timeout if ring and ring.step >= 0 else max(self.timeout, LOADING_TIMEOUT)
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since >= limit:
                self.process.kill()
                raise TimeoutError
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def _ring(self) -> Ring | None:
        """The child's trace, once the child has made it."""
        if self.ring is None:
            with contextlib.suppress(IsolateError):
                self.ring = Ring(self.trace)
        return self.ring

    def _death(self, timeout: float | None, case: Case | None) -> Fault:
        try:
            # It closed its socket, so it is ending; a child that only pretends to is ended here.
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        ring = self._ring()
        text, routine = (ring.abort_text, ring.routine) if ring else ("", "")
        step, oom = self._in_flight(ring, case), _oom_kills() > self.ooms
        fault = fault_of(Death(status, step, routine or step.kind, text, self.log_text(), timeout, oom))
        fault = self._located(fault)
        self.launched = self.seen()
        self.close()
        return fault

    def _located(self, fault: Fault) -> Fault:
        """The fault laid at the CUDA call that the trace shows it began with, and at the node of a deep run.

        An oracle's fault is neither: it speaks of what was computed.
        """
        ring = self._ring()
        if ring is None or fault.kind in JUDGED_BY:
            return fault
        cuda = cuda_fault(ring, fault.step, self.log_text()) if self.hooked and may_be_cuda(fault) else None
        node = last_node(ring) if self.deep and fault.step.kind == "decode" else None
        return replace(cuda or fault, node=node)

    def _failed_call(self) -> str:
        """The CUDA call that failed first since the last request, in words; "" where none did, or none is seen."""
        ring = self._ring() if self.hooked else None
        fault = cuda_fault(ring, StepInFlight(None, "load"), self.log_text()) if ring else None
        return fault.explanation if fault else ""

    def _in_flight(self, ring: Ring | None, case: Case | None) -> StepInFlight:
        kind, number = ring.in_flight() if ring else ("bind", -1)
        if number < 0 or case is None or number >= len(case.steps):
            return StepInFlight(None, kind)
        return StepInFlight(number, kind, case.steps[number].tokens_by_slot())

    def log_text(self) -> str:
        """The end of what the child wrote since the last request."""
        size = os.fstat(self.log).st_size
        start = max(0, size - (1 << 16))
        return os.pread(self.log, size - start, start).decode(errors="replace")

    def seen(self) -> frozenset[tuple[str, int]]:
        """The kernels launched for the last request; also once the child is gone, when it died of it."""
        ring = self._ring() if self.hooked and self.trace >= 0 else None
        return kernels_seen(ring) if ring else self.launched

    def close(self) -> None:
        """End the process and give everything back."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        if self.ended >= 0:
            os.close(self.ended)
            self.ended = -1
        if self.ring is not None:
            self.ring.close()
        try:
            if self.keep is not None:
                _copy(self.trace, self.keep)
        finally:
            self.keep = None
            for descriptor in (self.trace, self.log):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self.trace = self.log = -1


def may_be_cuda(fault: Fault) -> bool:
    """A CUDA error can be behind it: ggml says so when it aborts for one, and a call may return a failure without a word.

    Errors that ggml handled (a graph that cannot be updated is made anew) are in the trace of any run.
    """
    if fault.kind == "assert":
        return GGML_SAYS.search(fault.origin.text) is not None
    return fault.kind in ("decode", "state") and (fault.origin.code or 0) <= 0


def _writable(path: Path) -> Path:
    """The path, when a trace can be written there."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise IsolateError(f"{path}: the trace cannot be written: {error.strerror}") from None
    return path


def _copy(trace: int, path: Path) -> None:
    """Write the trace in a descriptor to a file."""
    try:
        with Path(f"/proc/self/fd/{trace}").open("rb") as source, path.open("wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise IsolateError(f"{path}: the trace cannot be written: {error.strerror}") from None


#: What llama.cpp says of a model that is newer than it.
_NO_ARCHITECTURE = re.compile(r"unknown model architecture: '([\w.-]+)'")


def _refusal(reply: protocol.Refused, log: str, failed_call: str) -> IsolateError:
    """The child's error; where the library refused a model or a context, with the CUDA call that failed or what it said last."""
    named = getattr(errors, reply.error, IsolateError)
    kind = named if isinstance(named, type) and issubclass(named, IsolateError) else IsolateError
    why = ""
    if kind is ModelError and failed_call:
        why = f" (the CUDA call that failed: {failed_call})"
    elif kind is ModelError and (said := tail(log)):
        # The last line says only that it failed.
        missing = next((found[1] for line in said if (found := _NO_ARCHITECTURE.search(line))), "")
        if missing:
            return BuildError(
                f"this build has no architecture {missing}: pass --model zoo:NAME with one it has, such as zoo:llama"
            )
        why = f" (the library said: {said[-1].strip()[:300]})"
    refusal: IsolateError = kind(reply.message + why)
    return refusal


def _oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started."""
    with contextlib.suppress(OSError, ValueError), Path("/proc/vmstat").open() as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
