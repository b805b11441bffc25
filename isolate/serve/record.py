"""Record a program: start it with the recorder in front of libllama, and make a case of what it called.

With hooks the CUDA calls are traced too; with a dry target the simulated device is put in front of CUDA's libraries, so
that the program runs as it is on a machine without that GPU. The recording lies in a temporary file, which the program
appends to; it is read when the program has ended, however it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from isolate.case import Case, Checkpoint, Context, Decode, Model, Save
from isolate.fault import Fault, StepInFlight
from isolate.replay.target import Target, child_environment, find
from isolate.serve.program import RecordError, check_program, find_program
from isolate.serve.recorded import Recorded, steps_of
from isolate.serve.recording import Kind, read
from isolate.trace.explain import cuda_fault
from isolate.trace.origin import find_origin, went_on
from isolate.trace.ring import Ring, native_library

#: What the dynamic linker ends a program with that it cannot start, and a shell one that is not there.
LOADER_FAILED = 127


@dataclass(frozen=True)
class Made:
    """What came of a recording."""

    case: Case
    notes: tuple[str, ...]
    #: the folder of the libllama that it called
    build: str
    #: what ran the graph, as far as is known: a replay must run there
    target: str
    #: how the program ended, as a shell counts: 128 and the signal's number
    status: int
    #: the last call did not come back
    unfinished: bool
    #: a CUDA call that failed, where the hooks were in front of them
    fault: Fault | None


def record(command: Sequence[str], target: str = "cpu", build: str | None = None, trace: Path | None = None) -> Made:
    """Run a command to its end and return the case. RecordError when it cannot be recorded or called nothing."""
    program = find_program(command[0])
    linked = check_program(program)
    with tempfile.TemporaryDirectory(prefix="isolate-record-") as folder:
        file = Path(folder, "calls")
        file.touch()
        hooked = trace is not None or target != "cpu"
        ring = trace or Path(folder, "trace")
        _remove(ring)
        chosen = None if target == "cpu" else find(target, build or (str(linked) if linked else None))
        environment = _environment(file, ring if hooked else None, chosen)
        status = _run([str(program), *command[1:]], environment)
        return _made(command[0], file, ring if hooked else None, status, build, chosen)


def _remove(trace: Path) -> None:
    """An older trace of that name: a program that makes no CUDA call writes none."""
    try:
        trace.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"{trace}: the trace cannot be written: {error.strerror}") from None


def _environment(file: Path, ring: Path | None, target: Target | None) -> dict[str, str]:
    """The program's: the recorder before all, then the hooks, then what stands in for CUDA."""
    first = [native_library("record"), *([native_library("trace")] if ring else []), *(target.before if target else ())]
    already = os.environ.get("LD_PRELOAD", "")
    preload = ":".join([*(str(path) for path in first), *([already] if already else [])])
    if any(character in preload for character in " \t"):
        raise RecordError("isolate is installed below a folder with a space in its name, which LD_PRELOAD cannot say")
    traced = {"ISOLATE_TRACE": str(ring.absolute())} if ring else {}
    own = target.environment if target else {}
    quiet = {"GGML_NO_BACKTRACE": "1"}
    return {**os.environ, **quiet, **own, **traced, "LD_PRELOAD": preload, "ISOLATE_RECORD": str(file)}


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run it to its end, as a shell counts that. A request to end is passed on; the program then ends by itself."""
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        # Ctrl-C at a terminal goes to the program, too, and a server takes a second one for haste.
        if process is not None and number != signal.SIGINT:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = subprocess.Popen(command, env=environment)
        status = process.wait()
    except OSError as error:
        raise RecordError(f"{command[0]}: it does not start: {error.strerror}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _made(word: str, file: Path, ring: Path | None, status: int, build: str | None, target: Target | None) -> Made:
    recording = read(file)
    ended = f"; it ended with {status}" if status else ""
    if recording.first(Kind.OPENED) is None:
        why = "it is linked statically, or the system allows no LD_PRELOAD"
        if status == LOADER_FAILED:
            why = "the linker found no library that it needs, or a script no program (it said so above)"
        raise RecordError(f"{word}: the recorder was not loaded into it{ended}: {why}")
    if recording.first(Kind.CONTEXT) is None:
        why = "made no context" if recording.first(Kind.MODEL) else "called no libllama (or has it linked statically)"
        raise RecordError(f"{word}: it was started and {why}{ended}, so there is nothing to record")
    found = steps_of(recording)
    if ring and not ring.is_file():
        found.notes.append("it made no CUDA call that the hooks saw, so there is no trace")
        ring = None
    if not found.steps:
        raise RecordError(f"{word}: it made a context and decoded nothing{ended}, so there is nothing to record")
    context = _context(found, build, target)
    about = "\n".join([f"Recorded from {Path(word).name}, {len(found.steps)} calls.", *found.notes])
    model = Model(file=str(Path(found.model).absolute()))
    # llama.h speaks of one sequence: the state of all at once, by -1, oversteps it.
    hostile = any(isinstance(step, Checkpoint | Save) and step.slot < 0 for step in found.steps)
    case = Case(isolate=1, model=model, steps=found.steps, about=about, context=context, api=found.api, hostile=hostile)
    return Made(
        case,
        tuple(found.notes),
        str(Path(found.library).parent),
        ran_on(ring, target),
        status,
        found.unfinished,
        _fault(ring, case) if ring else None,
    )


def _context(found: Recorded, build: str | None, target: Target | None) -> Context:
    """The context's settings, from a child that knows the layout of the program's own libllama."""
    words = [sys.executable, "-m", "isolate.replay.params", build or found.library, found.params.hex()]
    words += [str(path) for path in target.before] if target else []
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=child_environment(target or find("cpu"))
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise RecordError(f"{found.library}: the build died while it was asked for its layouts; pass --build") from None
    if "error" in answer:
        raise RecordError(f"what the program called was recorded, and its settings cannot be read: {answer['error']}")
    settings = answer["settings"]
    # 0 asks for what the model was trained with.
    settings["n_ctx"] = settings["n_ctx"] or found.context_size
    try:
        return msgspec.convert(settings, Context)
    except msgspec.ValidationError as error:
        raise RecordError(f"the program made a context that a case cannot say: {error}") from None


def ran_on(ring: Path | None, target: Target | None) -> str:
    """The target that the program ran on: the simulated one that it was given, or the GPU where its launches were seen."""
    if target or not ring:
        return target.name if target else "cpu"
    with Ring(ring) as trace:
        return "cuda" if trace.launches else "cpu"


def _fault(ring: Path, case: Case) -> Fault | None:
    """The first CUDA call that failed and was not handled, laid at the last decode."""
    with Ring(ring) as trace:
        found = find_origin(trace)
        if found is None or went_on(trace, found):
            return None
        number = max((i for i, step in enumerate(case.steps) if isinstance(step, Decode)), default=0)
        step = case.steps[number]
        return cuda_fault(trace, StepInFlight(number, step.kind, step.tokens_by_slot()), "")
