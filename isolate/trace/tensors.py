"""What each graph node computed, copied as it is computed: by the eval callback of ggml's scheduler, on any backend.

A node is evaluated alone and synchronized before the callback gets it, so its values are those the next node reads. Where
ggml_tensor keeps its strides and what it is a view of is measured in the build at hand, as in `node.py`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isolate.errors import BuildError
from isolate.trace.node import InitParams, find_field, measure

Values = npt.NDArray[np.float32]

#: GGML_MAX_SRC of ggml.h.
_SOURCES = 10
_FLOATS = {"f32": np.float32, "f16": np.float16}
_INTEGERS = {"i32": np.int32, "i64": np.int64}
#: One part in so many of the memory there is may go to one recording's values: up to four are held at once.
_SHARE = 8
#: Bytes of an input that is copied for every node that has it: token ids, positions, indices of rows.
_SMALL = 1 << 16
#: The last node of a graph of llama.cpp that gives logits.
LAST = "result_output"

_OnNode = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


@dataclass(frozen=True)
class Tensor:
    """A ggml_tensor: what it is called and how it lies in memory. Dimensions in ggml's order, the fastest first."""

    address: int
    name: str
    op: str
    type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sources: tuple[int, ...]
    #: name of the tensor that it is a view of, its own where it is none
    base: str
    #: it was copied from another backend, where the tensor of this name is
    copied: bool = False


@dataclass
class Seen:
    """A node as it was computed."""

    #: position among the nodes of its graph, from 0
    index: int
    tensor: Tensor
    #: None where they were not kept
    values: Values | None
    #: each source: the node that computed it, or the tensor that was there before
    sources: tuple[int | Tensor, ...]
    #: contents of sources that no node computed, by place among the sources
    inputs: dict[int, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass
class Graph:
    """The nodes of one ubatch, in the order of evaluation."""

    nodes: list[Seen] = field(default_factory=list)
    #: node by the address of its tensor, and by its name
    places: dict[int, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    #: names of the inputs by which its tokens are looked up
    tokens: set[str] = field(default_factory=set)
    #: nodes whose values were not kept, for there were too many
    left: int = 0

    def named(self, name: str) -> Seen | None:
        """The last node of a name."""
        return self.nodes[self.names[name]] if name in self.names else None


class Tensors:
    """Reads ggml_tensor structs of one build. BuildError where their layout is not found."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.at = {**measure(library), **_measure_more(library)}

    def read(self, address: int) -> Tensor:
        """The tensor at an address."""
        library, at = self.library, self.at
        base = self._pointer(address, "view_src") or address
        sources = struct.unpack(f"<{_SOURCES}Q", ctypes.string_at(address + at["src"], 8 * _SOURCES))
        # a cast names itself among its sources
        name, copied = _name(library.ggml_get_name(address))
        return Tensor(
            address,
            name,
            _text(library.ggml_op_desc(address)),
            _text(library.ggml_type_name(self._integer(address))),
            struct.unpack("<4q", ctypes.string_at(address + at["ne"], 32)),
            struct.unpack("<4Q", ctypes.string_at(address + at["nb"], 32)),
            tuple(source for source in sources if source not in (0, address)),
            _name(library.ggml_get_name(base))[0],
            copied,
        )

    def size(self, tensor: Tensor) -> int:
        """Bytes from its first element to its last."""
        return int(self.library.ggml_nbytes(tensor.address)) if all(tensor.shape) else 0

    def values(self, tensor: Tensor) -> npt.NDArray[Any] | None:
        """Its elements in ggml's order of dimensions, quantized ones dequantized; None where it is empty or of a type unknown."""
        size = self.size(tensor)
        if size == 0:
            return None
        data = ctypes.create_string_buffer(size)
        self.library.ggml_backend_tensor_get(tensor.address, data, 0, size)
        kind = _FLOATS.get(tensor.type) or _INTEGERS.get(tensor.type)
        if kind is not None:
            found = np.ndarray(tensor.shape, kind, memoryview(data), 0, tensor.strides)
            return found.astype(np.float32) if tensor.type in _FLOATS else found.copy()
        width = tensor.strides[1] if tensor.shape[1] > 1 else size
        row = int(self.library.ggml_row_size(self._integer(tensor.address), tensor.shape[0]))
        if width < row:
            return None
        shape, strides = (row, *tensor.shape[1:]), (1, *tensor.strides[1:])
        return dequantized(np.ndarray(shape, np.uint8, memoryview(data), 0, strides), tensor.type)

    def _integer(self, address: int) -> int:
        return ctypes.c_int32.from_address(address + self.at["type"]).value

    def _pointer(self, address: int, name: str) -> int:
        return ctypes.c_uint64.from_address(address + self.at[name]).value


class Recorder:
    """Copies the nodes that are computed while `on`; `callback` is for llama_context_params.cb_eval.

    `wanted`: (graph, node) whose inputs are copied too, whatever their size. `also` is called first for each node.
    """

    def __init__(
        self,
        tensors: Tensors,
        wanted: frozenset[tuple[int, int]] = frozenset(),
        also: Callable[[int, bool, int], bool] | None = None,
    ) -> None:
        self.tensors = tensors
        self.wanted = wanted
        self.also = also
        self.on = False
        self.graphs: list[Graph] = []
        self.size = 0
        self.most = _available() // _SHARE
        self._error: Exception | None = None
        self._ended = True
        self.callback = _OnNode(self._on_node)

    def taken(self) -> list[Graph]:
        """What was copied; copies no more. What went wrong in the callback is raised here."""
        self.on = False
        if self._error is not None:
            raise self._error
        return self.graphs

    def _on_node(self, address: int, ask: bool, user: int) -> bool:
        if self.also is not None:
            self.also(address, ask, user)
        if self.on and self._error is None:
            try:
                self._begin(address) if ask else self._end(address)
            except Exception as error:
                # must not pass through the library
                self._error = error
        return True

    def _begin(self, address: int) -> None:
        tensor = self.tensors.read(address)
        ids = self._token_ids(tensor)
        # tokens that were looked up already: another graph, after one that gives no logits
        if self._ended or (ids and ids in self.graphs[-1].tokens):
            self.graphs.append(Graph())
            self._ended = False
        graph = self.graphs[-1]
        graph.tokens.add(ids)
        index = len(graph.nodes)
        sources = [self._source(graph, source) for source in tensor.sources]
        seen = Seen(index, tensor, None, tuple(sources))
        whole = (len(self.graphs) - 1, index) in self.wanted
        for place, source in enumerate(tensor.sources):
            before = self.tensors.read(source)
            small = before.type in _INTEGERS and self.tensors.size(before) <= _SMALL
            if (whole and not is_weight(before.name)) or (small and isinstance(sources[place], Tensor)):
                values = self.tensors.values(before)
                if values is not None:
                    seen.inputs[place] = values
        graph.nodes.append(seen)
        graph.places[address] = index
        graph.names[tensor.name] = index

    def _token_ids(self, tensor: Tensor) -> str:
        """Name of the input by which a node looks tokens up; "" for other nodes."""
        if tensor.op != "GET_ROWS" or len(tensor.sources) < 2:
            return ""
        weights, ids = (self.tensors.read(source).name for source in tensor.sources[:2])
        return ids if weights == "token_embd.weight" else ""

    def _source(self, graph: Graph, address: int) -> int | Tensor:
        if address in graph.places:
            return graph.places[address]
        tensor = self.tensors.read(address)
        return graph.names.get(tensor.name, tensor) if tensor.copied else tensor

    def _end(self, address: int) -> None:
        seen = self.graphs[-1].nodes[-1]
        self._ended = seen.tensor.name == LAST
        if seen.tensor.type in _INTEGERS or is_cache(seen.tensor.base):
            return
        if self.size + self.tensors.size(seen.tensor) > self.most:
            self.graphs[-1].left += 1
            return
        seen.values = self.tensors.values(seen.tensor)
        self.size += 0 if seen.values is None else seen.values.nbytes


def is_cache(name: str) -> bool:
    """The name of a tensor of llama.cpp's memory: cells of attention or recurrent states."""
    return name.startswith("cache_")


def is_weight(name: str) -> bool:
    """The name of a tensor of the model's file."""
    return name.endswith((".weight", ".bias"))


def dequantized(rows: npt.NDArray[np.uint8], kind: str) -> Values:
    """Rows of quantized bytes (first dimension) as numbers; of a type that gguf does not know, the bytes themselves."""
    from gguf import GGMLQuantizationType, quants

    whole = np.ascontiguousarray(np.moveaxis(rows, 0, -1))
    try:
        found = quants.dequantize(whole, GGMLQuantizationType[kind.upper()])
    except (KeyError, NotImplementedError):
        found = whole.astype(np.float32)
    return np.moveaxis(np.asarray(found, np.float32), -1, 0)


def _measure_more(library: Any) -> dict[str, int]:
    """Offsets of `nb` and `view_src` in the ggml_tensor of a build."""

    def call(name: str, result: Any, *types: Any) -> Callable[..., Any]:
        function = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        return ctypes.CFUNCTYPE(result, *types)(function or 0)

    new_tensor = call("ggml_new_tensor_4d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4)
    view = call("ggml_view_tensor", *[ctypes.c_void_p] * 3)
    overhead = call("ggml_tensor_overhead", ctypes.c_size_t)()
    context = call("ggml_init", ctypes.c_void_p, InitParams)(InitParams(1 << 20, None, True))
    if not context:
        raise BuildError("ggml_init of this build made no context, so nodes cannot be read: run without --deep.")
    try:
        tensors = {new_tensor(context, 0, *shape): shape for shape in ((3, 5, 7, 11), (13, 17, 19, 23))}
        views = {view(context, tensor): tensor for tensor in tensors}
        images = {address: ctypes.string_at(address, overhead) for address in (*tensors, *views)}
    finally:
        call("ggml_free", None, ctypes.c_void_p)(context)
    strides = {address: struct.pack("<4Q", *_strides(shape)) for address, shape in tensors.items()}
    return {
        "nb": find_field("nb", images, strides),
        "view_src": find_field("view_src", images, {at: struct.pack("<Q", of) for at, of in views.items()}),
    }


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    stride = 4
    for count in shape:
        yield stride
        stride *= count


def _available() -> int:
    """Bytes of memory that could be had."""
    with Path("/proc/meminfo").open() as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), 1 << 32)


def _name(name: bytes | None) -> tuple[str, bool]:
    """A tensor's name, and whether it is a copy: BACKEND#NAME#NUMBER is what goes from one backend to another."""
    text = _text(name)
    parts = text.split("#")
    return (parts[1], True) if len(parts) == 3 else (text, False)


def _text(name: bytes | None) -> str:
    return (name or b"").decode(errors="replace")
