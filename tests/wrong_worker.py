"""A worker whose library does something wrong at a chosen step, behind the engine's back: WRONG is `what@step`."""

from __future__ import annotations

import ctypes
import os

from isolate.case import Step
from isolate.replay import engine, noise, worker

what, _, at = os.environ["WRONG"].partition("@")

original = engine.Engine._do


def state(of: engine.Engine, slot: int, flags: int) -> bytes:
    data = ctypes.create_string_buffer(of.library.llama_state_seq_get_size_ext(of.context, slot, flags))
    of.library.llama_state_seq_get_data_ext(of.context, data, len(data), slot, flags)
    return data.raw


def set_state(of: engine.Engine, data: bytes, slot: int, flags: int) -> None:
    assert of.library.llama_state_seq_set_data_ext(of.context, data, len(data), slot, flags)


def turn(of: engine.Engine) -> None:
    """Keys of slot 0 are rotated by 5 positions less than they should be, the positions are right."""
    memory = of.memory
    of.library.llama_memory_seq_add(memory, 0, -1, -1, 5)
    set_state(of, state(of, 0, 0), 0, 0)
    of.library.llama_memory_seq_add(memory, 0, -1, -1, -5)


def poison(of: engine.Engine) -> None:
    """Near the end of slot 0's state are NaN; the very end is the number of cells in another stream."""
    data = state(of, 0, 0)
    set_state(of, data[:-4100] + b"\xff" * 4096 + data[-4:], 0, 0)


def lossy(of: engine.Engine) -> None:
    """From here on, setting a state loses the cell at position 3."""
    library = of.library
    right = library.llama_state_seq_set_data_ext

    def wrong(context: int, data: bytes, size: int, slot: int, flags: int) -> int:
        moved = int(right(context, data, size, slot, flags))
        library.llama_memory_seq_rm(library.llama_get_memory(context), slot, 3, 4)
        return moved

    library.llama_state_seq_set_data_ext = wrong


WRONGS = {
    # a cell in the middle is lost
    "hole": lambda of: of.library.llama_memory_seq_rm(of.memory, 0, 3, 4),
    # twenty are
    "gap": lambda of: of.library.llama_memory_seq_rm(of.memory, 0, 20, 40),
    # the newest cell is lost
    "tail": lambda of: of.library.llama_memory_seq_rm(of.memory, 0, 59, -1),
    # the whole slot is lost
    "all": lambda of: of.library.llama_memory_seq_rm(of.memory, 0, -1, -1),
    # everything is one position further
    "move": lambda of: of.library.llama_memory_seq_add(of.memory, 0, -1, -1, 1),
    # slot 0 holds what slot 1 holds, or only the half that a checkpoint has
    "swap": lambda of: set_state(of, state(of, 1, 0), 0, 0),
    "half": lambda of: set_state(of, state(of, 1, 1), 0, 1),
    "turn": turn,
    "poison": poison,
    "lossy": lossy,
}


def planted(self: engine.Engine, index: int, step: Step) -> engine.Result:
    if what in WRONGS and index == int(at):
        WRONGS[what](self)
    return original(self, index, step)


if what == "noisy":
    noise.SEPARATED = 1e30
engine.Engine._do = planted  # type: ignore[method-assign]
worker.main()
