"""How a child ended, read from its wait status, its log and its trace: the fault that the child could not report."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from itertools import groupby

from isolate.fault import Call, Fault, Signature, StepInFlight

ASSERTION = re.compile(r"^(?P<file>\S+\.(?:c|cc|cpp|h|hpp|cu|cuh|m|mm)):(?P<line>\d+): (?P<text>.+)$", re.MULTILINE)
UNCAUGHT = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^']+)'(?:\s+what\(\):\s+(?P<what>.*))?"
)


@dataclass(frozen=True)
class Death:
    """What is known of a child that ended before it answered."""

    #: as Popen.returncode: negative for a signal
    status: int
    step: StepInFlight
    #: the library call that the step was in, or the step's kind before its first
    routine: str
    #: ggml's abort message, "" where there is none
    abort_text: str
    #: what the child wrote to its standard output and error
    log: str
    #: seconds without progress after which the parent killed it, None when it did not
    timeout: float | None = None
    #: the kernel killed a process for want of memory while the child ran
    out_of_memory: bool = False


def fault_of(death: Death) -> Fault:
    """The fault behind a death: the most exact reading of what was left."""
    if death.timeout is not None:
        said = f"no progress for {death.timeout:g} seconds"
        return _fault(death, "hang", death.routine, None, said, f"{said}; the child was killed")
    if death.status < 0:
        return _signalled(death, -death.status)
    said = f"the process ended with status {death.status}"
    return _fault(death, "exit", death.routine, death.status, said, f"{said} in the middle of the step")


def _signalled(death: Death, number: int) -> Fault:
    if number == signal.SIGABRT:
        assertion = ASSERTION.search(death.abort_text) or ASSERTION.search(death.log)
        uncaught = UNCAUGHT.search(death.log)
        if uncaught and not death.abort_text:
            said = f"{uncaught['type']}: {(uncaught['what'] or 'no message').strip()}"
            return _fault(death, "exception", said, None, said, f"a C++ exception that nobody caught: {said}")
        if assertion:
            file = assertion["file"].rsplit("/", 1)[-1]
            where = f"{file}:{assertion['line']}: {assertion['text']}"
            call = Call(death.routine, None, assertion["text"], file, int(assertion["line"]))
            signature = Signature("assert", where, None, death.step.kind)
            return Fault(
                "assert", signature, death.step, call, call, f"the library aborted at {where}", log=tail(death.log)
            )
    if number == signal.SIGKILL:
        if death.out_of_memory:
            said = "the kernel killed the process for want of memory"
            return _fault(death, "oom", death.routine, None, said, said)
        said = "the process was killed from outside (SIGKILL)"
        return _fault(death, "killed", death.routine, None, said, said)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    said = f"the process died of {name}: {signal.strsignal(number)}"
    return _fault(death, "signal", death.routine, number, said, said)


def _fault(death: Death, kind: str, where: str, code: int | None, said: str, explanation: str) -> Fault:
    call = Call(death.routine, code, said)
    signature = Signature(kind, where, code, death.step.kind)
    return Fault(kind, signature, death.step, call, call, explanation, log=tail(death.log))


def tail(log: str, lines: int = 20) -> tuple[str, ...]:
    """The last lines of a log, without empty ones, a line that follows itself once with the number of times."""
    kept = (line.rstrip() for line in log.splitlines() if line.strip())
    runs = ((line, sum(1 for _ in same)) for line, same in groupby(kept))
    return tuple(line if times == 1 else f"{line} ({times} times)" for line, times in runs)[-lines:]
