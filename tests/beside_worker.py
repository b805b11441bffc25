"""A worker with a fault of one kind in a decode: a case says `what@step` about itself. Only its own context has it."""

from __future__ import annotations

import ctypes
from typing import Any

from isolate.case import Context, Step
from isolate.errors import BuildError
from isolate.library.bind import Library
from isolate.replay import batch, engine, recording, worker
from isolate.trace.tensors import Tensors

#: what is done in the step that runs now
now = [""]

OnNode = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def state(of: engine.Engine, slot: int) -> bytes:
    data = ctypes.create_string_buffer(of.library.llama_state_seq_get_size(of.context, slot))
    of.library.llama_state_seq_get_data(of.context, data, len(data), slot)
    return data.raw


def set_state(of: engine.Engine, data: bytes, slot: int) -> None:
    assert of.library.llama_state_seq_set_data(of.context, data, len(data), slot)


def turn(of: engine.Engine) -> None:
    """Keys are turned by 5 positions less than the positions say."""
    of.library.llama_memory_seq_add(of.memory, 0, -1, -1, 5)
    set_state(of, state(of, 0), 0)
    of.library.llama_memory_seq_add(of.memory, 0, -1, -1, -5)


def value(of: engine.Engine) -> None:
    """The first byte's worth of values in the last layer: the end of a state is V, in rows a dimension, then other streams."""
    data = bytearray(state(of, 0))
    for place in range(len(data) - 4 - 4 * 60, len(data) - 4, 4):
        data[place : place + 4] = b"\0\0\x20\x41"
    set_state(of, bytes(data), 0)


def nan(of: engine.Engine) -> None:
    data = bytearray(state(of, 0))
    data[-4 - 4 * 60 : -4] = b"\xff" * (4 * 60)
    set_state(of, bytes(data), 0)


def foreign(of: engine.Engine) -> None:
    """The slot also gets the cell at position 7 of slot 1."""
    of.library.llama_memory_seq_cp(of.memory, 1, 0, 7, 8)


WRONGS = {
    "lost": lambda of: of.library.llama_memory_seq_rm(of.memory, 0, 3, 5),
    "swap": lambda of: set_state(of, state(of, 1), 0),
    "turn": turn,
    "value": value,
    "nan": nan,
    "foreign": foreign,
}

original = engine.Engine._do
fill = batch.Batch.fill
logits = engine.Engine.logits


def planted(self: engine.Engine, index: int, step: Step) -> engine.Result:
    what, _, at = self.case.about.removeprefix("blind ").partition("@")
    now[0] = what if str(index) == at else ""
    if now[0] in WRONGS:
        WRONGS[now[0]](self)
    result = original(self, index, step)
    # rows are handed out after the step
    now[0] = now[0] if now[0] == "row" else ""
    return result


def filled(self: batch.Batch, fed: list[batch.Fed], outputs: list[list[int]]) -> None:
    fill(self, fed, outputs)
    if now[0] == "token":
        self.token[0] ^= 1


def handed_out(self: engine.Engine, row: engine.Row) -> Any:
    """Two rows of the decode change places."""
    other = {0: 3, 3: 0}.get(row.index, row.index) if now[0] == "row" else row.index
    return logits(self, engine.Row(row.slot, row.position, other))


opened = engine.Engine.open


def with_callback(self: engine.Engine, settings: Context | None = None) -> None:
    """`mask`, `kernel`, `position`: values are changed where the graph has them."""
    now[0] = ""
    if self.eval_callback is not None:
        record, tensors, call = self.eval_callback, Tensors(self.library), self.library._find("ggml_get_data")
        call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

        def change(tensor: int, ask: bool, user: int) -> bool:
            if now[0] in ("mask", "kernel", "position"):
                seen = tensors.read(tensor)
                if now[0] == "position" and ask and seen.op == "ROPE" and seen.name == "Qcur-0":
                    ctypes.c_int32.from_address(call(seen.sources[1])).value += 1
                if now[0] == "mask" and ask and seen.op == "SOFT_MAX":
                    # the row of slot 0 is the first: its fourth cell is hidden
                    ctypes.c_float.from_address(call(seen.sources[1]) + 12).value = float("-inf")
                if now[0] == "kernel" and not ask and seen.name == "ffn_up-1":
                    ctypes.c_float.from_address(call(tensor) + 40).value += 3.0
            return bool(record(tensor, ask, user))

        self.eval_callback = OnNode(change)
    opened(self, settings)


def blind(library: Library) -> Tensors:
    raise BuildError("its tensors are not laid out as expected")


beside = worker.Worker.beside


def with_cpu(self: worker.Worker, of: engine.Engine, *arguments: Any) -> Any:
    """As on a GPU, where the model is loaded on the CPU too."""
    self.setup.gpu_layers = 1
    vars(recording)["Tensors"] = blind if of.case.about.startswith("blind ") else Tensors
    try:
        return beside(self, of, *arguments)
    finally:
        self.setup.gpu_layers = 0


worker.Worker.beside = with_cpu  # type: ignore[method-assign, assignment]
engine.Engine._do = planted  # type: ignore[method-assign]
engine.Engine.logits = handed_out  # type: ignore[method-assign]
engine.Engine.open = with_callback  # type: ignore[method-assign]
batch.Batch.fill = filled  # type: ignore[method-assign]
worker.main()
