"""A worker that does at a chosen step what a broken library would: PLANT is `what@step`."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable

from isolate.case import Step
from isolate.replay import engine, worker

what, _, at = os.environ["PLANT"].partition("@")


def library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["PLANT_LIBRARY"])


PLANTS: dict[str, Callable[[], object]] = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(8),
    "hang": lambda: time.sleep(3600),
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "throw": lambda: library().throw_it(),
    "raise": lambda: 1 // 0,
}

OnNode = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

original = engine.Engine._do


def planted(self: engine.Engine, index: int, step: Step) -> engine.Result:
    if what == "callback":
        ctypes.c_int.in_dll(library(), "computing").value = index
    if what in PLANTS and index == int(at):
        PLANTS[what]()
    return original(self, index, step)


opened = engine.Engine.open


def with_callback(self: engine.Engine, settings: object = None) -> None:
    """`callback@step`: the graph's eval callback throws while that step is computed. `node@n`: abort at node n."""
    if what == "callback":
        self.eval_callback = library().throwing_callback
        ctypes.c_int.in_dll(library(), "throw_at").value = int(at)
    if what == "node" and self.eval_callback is not None:
        record = self.eval_callback
        seen = itertools.count()

        @OnNode
        def abort_at_node(tensor: int, ask: bool, user: int) -> bool:
            answer = bool(record(tensor, ask, user))
            if ask and next(seen) == int(at):
                os.abort()
            return answer

        self.eval_callback = abort_at_node
    opened(self, settings)  # type: ignore[arg-type]


engine.Engine._do = planted  # type: ignore[method-assign]
engine.Engine.open = with_callback  # type: ignore[method-assign]
worker.main()
