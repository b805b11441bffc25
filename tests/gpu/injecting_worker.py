"""A worker that makes one CUDA call of a case fail. The case's `about` says which: `fail KIND NUMBER CODE`.

A library that aborts takes its process with it, and a process on a GPU takes a second to start. So the case runs in a
thread, and the abort stops that thread for good instead: what it leaves in the trace is the same, and the next case has
a thread, a model and a context of its own. With `die` at the end of `about` the process goes as it would.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time

from isolate.fault import StepInFlight
from isolate.replay import protocol, worker
from isolate.replay.death import Death, fault_of
from isolate.trace.hooks import Hooks
from isolate.trace.record import Kind
from isolate.trace.ring import Ring

OnAbort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
NOTHING = (Kind.LAUNCH, 0, 0)


def wanted(about: str) -> tuple[Kind, int, int]:
    """What `about` says is to fail."""
    words = about.split()
    return (Kind[words[1]], int(words[2]), int(words[3])) if words[0] == "fail" else NOTHING


Plain = worker.Worker


class InjectingWorker(Plain):
    def run(self, request: protocol.RunCase) -> protocol.Ran:
        about = request.case.about
        answers: queue.SimpleQueue[protocol.Ran | BaseException | bytes] = queue.SimpleQueue()

        def on_abort(message: bytes) -> None:
            self.writer.library.isolate_on_abort(message)
            if not about.endswith("die"):
                answers.put(message)
                while True:
                    time.sleep(3600)

        def work() -> None:
            Hooks(self.writer).inject(*wanted(about))
            try:
                answer: protocol.Ran | BaseException = Plain.run(self, request)
                self.models.free()
            except BaseException as error:
                answer = error
            answers.put(answer)

        # Whatever the last one left in the model it stopped in, this one begins anew.
        self.models.path = self.models.handle = None
        self.on_abort = OnAbort(on_abort)
        self.library.ggml_set_abort_callback(self.on_abort)
        threading.Thread(target=work, daemon=True).start()
        answer = answers.get()
        Hooks(self.writer).inject(*NOTHING)
        if isinstance(answer, BaseException):
            raise answer
        return self.stopped(answer.decode()) if isinstance(answer, bytes) else answer

    def stopped(self, message: str) -> protocol.Ran:
        """What a parent would read of a death."""
        with Ring(self.setup.trace) as ring:
            kind, number = ring.in_flight()
        step = StepInFlight(number if number >= 0 else None, kind)
        return protocol.Ran(fault_of(Death(-6, step, kind, message, "")), max(number, 0), 0.0, [])


if __name__ == "__main__":
    worker.Worker = InjectingWorker  # type: ignore[misc]
    worker.main()
