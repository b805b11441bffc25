"""Graph nodes, by the eval callback of ggml's scheduler: each is named in the trace before it is computed.

The callback itself is native (native/node.c). Where ggml_tensor keeps its type, shape and sources is measured in the
build at hand, by looking for known values in tensors that ggml made.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from isolate.errors import BuildError
from isolate.fault import Node
from isolate.trace.record import Kind, NodeDetail, Record
from isolate.trace.ring import Ring, Writer

#: ggml_type numbers that have not changed since GGUF was made (ggml.h), to be found in a tensor: F32, F16, I32
_TYPES = {0: "f32", 1: "f16", 26: "i32"}
_SHAPES = ((3, 5, 7, 11), (13, 17, 19, 23), (29, 31, 37, 41))
_ARENA = 1 << 20

_OnNode = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class InitParams(ctypes.Structure):
    """ggml_init_params (ggml.h)."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _TensorLayout(ctypes.Structure):
    """isolate_tensor_layout (native/node.c)."""

    _fields_ = (
        ("type", ctypes.c_uint64),
        ("ne", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("name", ctypes.c_void_p),
        ("op", ctypes.c_void_p),
        ("type_name", ctypes.c_void_p),
    )


class NodeTrace:
    """Makes every node that is computed a record of the trace.

    `library` gives ggml's functions as attributes (a Library, a CDLL); `callback` is a ggml_backend_sched_eval_callback
    for llama_context_params.cb_eval, its user data is not read. BuildError where the layout of a tensor is not found.
    """

    def __init__(self, library: Any, writer: Writer) -> None:
        layout = _TensorLayout(
            **measure(library),
            name=_address(library.ggml_get_name),
            op=_address(library.ggml_op_desc),
            type_name=_address(library.ggml_type_name),
        )
        writer.library.isolate_tensor_layout.restype = None
        writer.library.isolate_tensor_layout(ctypes.byref(layout))
        self.callback = _OnNode(_address(writer.library.isolate_on_node))


def last_node(ring: Ring) -> Node | None:
    """The node that was being computed when the trace ended; None where the last one had come back."""
    record = ring.last(Kind.NODE)
    return None if record is None or record.done else node_of(record)


def node_of(record: Record) -> Node | None:
    """The node a record is about."""
    detail = record.detail
    if not isinstance(detail, NodeDetail):
        return None
    return Node(detail.index, detail.op, record.name, detail.type, detail.shape, detail.sources)


def measure(library: Any) -> dict[str, int]:
    """Offsets of `type`, `ne` and `src` in the ggml_tensor of a build, bytes; BuildError where one is not found."""

    def call(name: str, result: Any, *types: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(result, *types)(_address(getattr(library, name)))

    type_name = call("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    for number, name in _TYPES.items():
        if type_name(number) != name.encode():
            raise BuildError(f"ggml type {number} of this build is called {type_name(number)!r}, not {name}.")
    overhead = call("ggml_tensor_overhead", ctypes.c_size_t)()
    new_tensor = call("ggml_new_tensor_4d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4)
    add = call("ggml_add", *[ctypes.c_void_p] * 4)
    free = call("ggml_free", None, ctypes.c_void_p)
    context = call("ggml_init", ctypes.c_void_p, InitParams)(InitParams(_ARENA, None, True))
    if not context:
        raise BuildError("ggml_init of this build made no context, so nodes cannot be named: run without --deep.")
    try:
        tensors = [new_tensor(context, type_, *shape) for type_, shape in zip(_TYPES, _SHAPES, strict=True)]
        other = new_tensor(context, 0, *_SHAPES[0])
        sums = {add(context, *pair): pair for pair in ((tensors[0], other), (other, tensors[0]))}
        images = {address: ctypes.string_at(address, overhead) for address in (*tensors, *sums)}
    finally:
        free(context)
    return {
        "type": find_field(
            "type", images, {tensor: struct.pack("<i", type_) for tensor, type_ in zip(tensors, _TYPES, strict=True)}
        ),
        "ne": find_field(
            "ne", images, {tensor: struct.pack("<4q", *shape) for tensor, shape in zip(tensors, _SHAPES, strict=True)}
        ),
        "src": find_field("src", images, {sum_: struct.pack("<2Q", *pair) for sum_, pair in sums.items()}),
    }


def find_field(field: str, images: dict[int, bytes], wanted: dict[int, bytes]) -> int:
    """The one offset at which each tensor holds the bytes wanted of it."""
    size = len(next(iter(wanted.values())))
    end = len(next(iter(images.values()))) - size
    found = [
        offset
        for offset in range(0, end + 1, min(size, 8))
        if all(images[address][offset : offset + size] == value for address, value in wanted.items())
    ]
    if len(found) != 1:
        raise BuildError(
            f"ggml_tensor of this build holds the known value of `{field}` at {len(found)} places (offsets {found}) "
            "instead of one, so nodes cannot be named safely: run without --deep."
        )
    return found[0]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
