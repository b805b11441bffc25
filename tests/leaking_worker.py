"""A worker whose library leaks in every step of a kind: LEAK is `what@kind`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

from isolate.case import Step
from isolate.replay import engine, worker
from isolate.replay.batch import Fed

what, _, kind = os.environ["LEAK"].partition("@")
kept: list[bytes] = []


def cell(of: engine.Engine) -> None:
    """One more cell belongs to a slot that is not in use."""
    slot = of.settings.n_seq_max - 1
    start = of.library.llama_memory_seq_pos_max(of.memory, slot) + 1
    of.batch.fill([Fed(slot, np.array([1], np.int32), start)], [[]])
    assert of.library.llama_decode(of.context, of.batch.structure) == 0


def allocation(of: engine.Engine) -> None:
    assert of.writer.library.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1000)) == 0


def graph(of: engine.Engine) -> None:
    """A CUDA graph is instantiated and kept."""
    cuda = of.writer.library
    stream, made, executable = (ctypes.c_void_p() for _ in range(3))
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    assert cuda.cudaStreamBeginCapture(stream, 2) == 0
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(made)) == 0
    assert cuda.cudaGraphInstantiate(ctypes.byref(executable), made, ctypes.c_ulonglong(0)) == 0
    assert cuda.cudaGraphDestroy(made) == 0
    assert cuda.cudaStreamDestroy(stream) == 0


LEAKS: dict[str, Callable[[engine.Engine], None]] = {
    "cell": cell,
    "allocation": allocation,
    "graph": graph,
    # touched, or it would not be resident
    "memory": lambda of: kept.append(os.urandom(1 << 14) * (1 << 9)),
}

original = engine.Engine._do


def leaking(self: engine.Engine, index: int, step: Step) -> engine.Result:
    result = original(self, index, step)
    if step.kind == kind:
        LEAKS[what](self)
    return result


engine.Engine._do = leaking  # type: ignore[method-assign]
worker.main()
