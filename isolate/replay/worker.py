"""The child: it loads a build, then runs what the parent asks for until the socket closes.

Started by the supervisor as `python -m isolate.replay.worker`. Whatever goes wrong in here, the parent reads it from
the trace, the log and the way this process ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec

from isolate import files
from isolate.case import NEED_NO_RESULTS, Case, Check, Model
from isolate.errors import DeviceError, IsolateError, ModelError
from isolate.fault import Call, Fault, Signature
from isolate.library.bind import Library
from isolate.library.find import find_build
from isolate.models import make
from isolate.replay import beside, protocol
from isolate.replay.engine import Engine, StepFailed
from isolate.replay.loaded import Models
from isolate.replay.oracle import Oracle
from isolate.replay.parent import end_with
from isolate.trace.hooks import Hooks
from isolate.trace.node import NodeTrace
from isolate.trace.record import Kind
from isolate.trace.ring import Ring, Writer


class Setup(msgspec.Struct):
    """How the supervisor wants its child; the descriptors are inherited."""

    build: str | None
    include: str | None
    before: list[str]
    gpu_layers: int
    computes: bool
    modes: list[str]
    window: tuple[int, int] | None
    socket: int
    trace: int
    log: int
    parent: int


class Worker:
    """A loaded build and the model in use."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.writer = Writer(f"/proc/self/fd/{setup.trace}")
        self.writer.step_begin(-1, "bind")
        # Before the build asks what its devices can do.
        Hooks(self.writer).set_modes(setup.modes, setup.window)
        self.library = Library(find_build(setup.build, setup.include), [Path(path) for path in setup.before])
        self.library.set_callbacks(self.writer.on_abort, self.writer.on_log, setup.log)
        self.library.llama_backend_init()
        if setup.gpu_layers:
            self.check_hooks()
        self.models = Models(self.library, self.writer, setup.gpu_layers, setup.computes)
        #: files of the zoo models that were asked for
        self.made: dict[Model, Path] = {}

    def check_hooks(self) -> None:
        """DeviceError where there is no GPU, or launches are seen neither by the hooks nor by CUPTI."""
        hooks = Hooks(self.writer)
        why_not = hooks.live().why_not()
        if why_not:
            not_loaded = self.why_not_loaded()
            if not_loaded:
                raise DeviceError(not_loaded)
            if "CUDA" not in self.library.describe()["backends"]:
                raise DeviceError("this build has no CUDA backend: pass --build a CUDA build of llama.cpp")
            why_not_either = hooks.attach_cupti(self.setup.modes)
            if why_not_either:
                raise DeviceError(f"launches cannot be seen in this build: {why_not}; {why_not_either}")
        call = self.library
        devices = [call.ggml_backend_dev_get(index) for index in range(call.ggml_backend_dev_count())]
        if not any(
            call.ggml_backend_reg_name(call.ggml_backend_dev_backend_reg(device)) == b"CUDA" for device in devices
        ):
            raise DeviceError("the build's CUDA backend finds no GPU here (see `isolate doctor`); try --target dry:GPU")

    def why_not_loaded(self) -> str:
        """Why a CUDA backend that lies in the build's folder of backends was not loaded; "" where it was, or is none."""
        cuda = self.library.describe()["cuda"]
        if cuda is None:
            return ""
        try:
            ctypes.CDLL(cuda["library"])
        except OSError as error:
            return f"the build's CUDA backend could not be loaded: {error}; try --target dry:GPU"
        return ""

    def hooks_in_words(self) -> str:
        """Whether the launch hooks stand in front of the build's CUDA calls, and which calls have none."""
        live = Hooks(self.writer).live()
        if not live.libraries:
            not_loaded = self.why_not_loaded()
            if not_loaded:
                return f"not attached: {not_loaded}"
            return "nothing to hook: this build has no CUDA backend that calls a shared CUDA runtime"
        if live.why_not():
            return f"not attached: {live.why_not()}"
        notes = sorted({record.name for record in Ring(self.setup.trace).records() if record.kind == Kind.NOTE})
        uncovered = f"; without a hook: {', '.join(notes)}" if notes else ""
        return f"attached to {live.hooked} CUDA imports of the build{uncovered}"

    def answer(self, request: protocol.Request) -> protocol.Reply:
        """Do what is asked. IsolateError when the case, the model or the build is not usable."""
        match request:
            case protocol.RunCase():
                return self.run(request)
            case protocol.Describe():
                return protocol.Answer({**self.library.describe(), "hooks": self.hooks_in_words()})
            case protocol.MakeModel():
                made = make(
                    self.library,
                    request.zoo,
                    request.type,
                    request.seed,
                    layers=request.layers,
                    experts=request.experts,
                )
                return protocol.Answer({"path": request.out, "bytes": copied(made, Path(request.out))})

    def run(self, request: protocol.RunCase) -> protocol.Ran:
        """Run one case; a fault found on the way is the answer, not an error."""
        start = time.perf_counter()
        nodes = NodeTrace(self.library, self.writer) if request.deep else None
        # The trace begins anew: launch numbers and errors are those of this case.
        self.writer.restart()
        record = self.writer.step_begin(-1, "load")
        self.models.load(self.model_path(request.case, request.folder))
        self.writer.step_end(record)
        engine = Engine(self.library, self.writer, self.models, request.case, nodes.callback if nodes else None)
        fault = None
        oracle = None
        steps = 0
        try:
            record = self.writer.step_begin(-1, "context")
            engine.open()
            self.writer.step_end(record)
            oracle = self.oracle(engine, request.check)
            for index, step, result in engine.steps():
                steps += 1
                if oracle is None:
                    continue
                record = self.writer.step_begin(index, "check")
                fault = oracle.after(index, step, result)
                self.writer.step_end(record)
                if fault is not None:
                    break
        except StepFailed as failed:
            fault = failed.fault
        except IsolateError:
            raise
        except Exception as error:
            fault = engine_fault(error, engine)
        # After a fault the trace stays at the step that failed: the parent reads it there.
        closing = self.writer.step_begin(-1, "close") if fault is None else None
        if oracle is not None:
            oracle.close()
        engine.close()
        engine.forget()
        if nodes is not None and oracle is not None and fault is not None and fault.kind in beside.KINDS:
            fault = self.beside(engine, oracle, nodes, fault)
        if closing is not None:
            self.writer.step_end(closing)
        return protocol.Ran(fault, steps, time.perf_counter() - start, oracle.notes if oracle else [])

    def beside(self, engine: Engine, oracle: Oracle, nodes: NodeTrace, fault: Fault) -> Fault:
        """The fault of an oracle with the node where it begins."""
        cpu = None
        if self.setup.gpu_layers and self.models.path is not None:
            cpu = Models(self.library, self.writer, 0)
            try:
                cpu.load(self.models.path)
            except ModelError:
                cpu = None
        try:
            return beside.explain(engine, fault, oracle.reference.empty, oracle.judge.room, nodes.callback, cpu)
        except Exception as error:
            # the fault stands, whatever becomes of its explanation
            traceback.print_exception(error)
            return beside.without(fault, f"isolate itself failed: {type(error).__name__}: {error}")
        finally:
            if cpu is not None:
                cpu.free()

    def oracle(self, engine: Engine, check: list[Check]) -> Oracle | None:
        """The oracles that were asked for, as far as this target has results to judge."""
        asked = frozenset(check) if self.setup.computes else frozenset(check) & NEED_NO_RESULTS
        return Oracle(engine, asked) if asked else None

    def model_path(self, case: Case, folder: str) -> Path:
        """The GGUF file of a case's model, made first when it is one of the zoo."""
        model = case.model
        if isinstance(model.file, str):
            return Path(folder, model.file)
        if model not in self.made:
            assert isinstance(model.zoo, str)
            quantization = model.type.upper() if isinstance(model.type, str) else "F32"
            seed = model.seed if isinstance(model.seed, int) else 1
            layers = model.layers if isinstance(model.layers, int) else None
            experts = model.experts if isinstance(model.experts, int) else None
            self.made[model] = make(self.library, model.zoo, quantization, seed, layers=layers, experts=experts)
        return self.made[model]


def copied(made: Path, out: Path) -> int:
    """Let a copy of a model appear; its bytes. ModelError where it cannot be written."""

    def copy(path: Path) -> str:
        shutil.copyfile(made, path)
        return out.name

    out = out.resolve()
    if out.exists() and not out.is_file():
        raise ModelError(f"{out}: not a file")
    try:
        return files.appear(out.parent, copy).stat().st_size
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error.strerror}") from None


def engine_fault(error: Exception, engine: Engine) -> Fault:
    """An exception of our own code is a fault too: the parent must not lose it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error}"
    call = Call(last.name, None, text, Path(last.filename).name, last.lineno)
    signature = Signature("engine", f"{call.file}:{call.line}: {type(error).__name__}", None, engine.in_flight.kind)
    traceback.print_exception(error)
    return Fault("engine", signature, engine.in_flight, call, call, f"isolate itself failed: {text}")


def prepare(setup: Setup) -> None:
    """Make this process one that dies with its parent, leaves no core file, and is the first the kernel kills."""
    end_with(setup.parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A sandbox may forbid it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def refused(error: Exception) -> protocol.Refused:
    """The answer to what cannot be done: a sentence for the user, also where the reason is an exception of our own."""
    if isinstance(error, IsolateError):
        return protocol.Refused(type(error).__name__, error.message)
    traceback.print_exception(error)
    return protocol.Refused("IsolateError", f"isolate itself failed: {type(error).__name__}: {error}")


def main() -> None:
    """Serve the parent that started this process."""
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    prepare(setup)
    with socket.socket(fileno=setup.socket) as connection, connection.makefile("rb") as requests:
        try:
            worker = Worker(setup)
        except Exception as error:
            connection.sendall(protocol.encode(refused(error)))
            os._exit(2)
        worker.writer.step_begin(-1, "idle")
        connection.sendall(protocol.encode(protocol.Ready()))
        for line in requests:
            try:
                reply = worker.answer(protocol.decode_request(line))
            except Exception as error:
                reply = refused(error)
            connection.sendall(protocol.encode(reply))
    # The library's destructors have nothing to add, and some builds crash in them.
    os._exit(0)


if __name__ == "__main__":
    main()
