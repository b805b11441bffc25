"""What was wrong with the inputs of the first node that differs: a cell, the mask, a position, a state; or nothing, so its kernel.

Each question is asked of both graphs, the case's and that of the slot alone; cells of attention are `attended.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from isolate.replay.recording import Run
from isolate.replay.rows import Ubatch, distances, position_ids, reads_positions, same_lines, token_ids
from isolate.trace.tensors import LAST, Graph, Seen, Tensor, Values

Kind = Literal["cell", "mask", "position", "token", "state", "row", "kernel", "unknown"]

#: Weights that make logits of a model's last layer.
_OUTPUT = frozenset({"output.weight", "token_embd.weight"})
_SAME_STATE = 1e-6
CELLS = ("cache_k", "cache_v")
_STATES = ("cache_r", "cache_s")


@dataclass(frozen=True)
class Cause:
    """What was wrong, in one word and one clause, and the numbers behind it."""

    kind: Kind
    said: str
    evidence: dict[str, Any] = field(default_factory=dict)


#: All that a node reads is as it should be.
AGREE = Cause("kernel", "its inputs agree: it is computed wrongly")


@dataclass(frozen=True)
class Side:
    """One of the two graphs: the node, the nodes before it that could not be compared, which rows are the slot's."""

    graph: Graph
    node: int
    #: the node and those before it whose inputs were copied
    through: tuple[int, ...]
    ubatch: Ubatch
    held: tuple[tuple[int, ...], ...] | None

    @property
    def seen(self) -> Seen:
        """The node."""
        return self.graph.nodes[self.node]

    def row(self, position: int) -> int:
        """The graph's row of a position."""
        return self.ubatch.rows[self.ubatch.positions.index(position)]

    def reads(self) -> Iterator[tuple[Seen, int, str]]:
        """What the nodes read that was copied: node, place among its sources, name of the tensor that holds it."""
        for index in self.through:
            seen = self.graph.nodes[index]
            for place in seen.inputs:
                source = seen.sources[place]
                tensor = source if isinstance(source, Tensor) else self.graph.nodes[source].tensor
                yield seen, place, tensor.base


def through(graph: Graph, node: int, compared: Sequence[bool]) -> tuple[int, ...]:
    """The node, and those it depends on by way of nodes that could not be compared."""
    found: set[int] = set()
    waiting = [node]
    while waiting:
        index = waiting.pop()
        if index in found:
            continue
        found.add(index)
        sources = graph.nodes[index].sources
        waiting += [source for source in sources if isinstance(source, int) and not compared[source]]
    return tuple(sorted(found))


def handed_out(case: Run, number: int) -> Cause | None:
    """A row of logits that is not the one the graph computed for it; None where all are."""
    for row, logits in case.logits:
        if row.slot != number:
            continue
        for graph, ubatch in zip(case.graphs, case.ubatches, strict=True):
            if row.position not in ubatch.output_positions:
                continue
            seen = _result(graph)
            if seen is None:
                return Cause(
                    "row", "its graph computes no logits, and yet some were handed out", {"position": row.position}
                )
            rows = _rows(seen)
            if rows is None:
                continue
            right = rows[ubatch.outputs.index(ubatch.rows[ubatch.positions.index(row.position)])]
            if right.shape == logits.shape and not np.array_equal(right, logits, equal_nan=True):
                return _other_row(case, row.position, logits, float(distances(logits[None], right[None])[0]))
    return None


def _result(graph: Graph) -> Seen | None:
    """The node that computes logits, by its name or, for some models, by its weights; None where a graph has none."""
    by_weights = (
        seen for seen in reversed(graph.nodes) if _OUTPUT.intersection(_names(seen)) and seen.tensor.op == "MUL_MAT"
    )
    return graph.named(LAST) or next(by_weights, None)


def _rows(seen: Seen | None) -> Values | None:
    return None if seen is None or seen.values is None else seen.values.reshape(seen.values.shape[0], -1).T


def _other_row(case: Run, position: int, logits: Values, nmse: float) -> Cause:
    whose = "none of its rows"
    for graph, ubatch in zip(case.graphs, case.ubatches, strict=True):
        rows = _rows(_result(graph))
        if rows is None:
            continue
        same = np.flatnonzero((rows == logits).all(axis=1))
        if len(same):
            place = dict(zip(ubatch.rows, ubatch.positions, strict=True)).get(ubatch.outputs[int(same[0])])
            whose = "those of another slot" if place is None else f"those of its position {place}"
    said = f"the logits computed for position {position} are not those handed out, which are {whose}"
    return Cause("row", said, {"position": position, "nmse": nmse, "handed_out": whose})


def numbers(mine: Side, alone: Side, position: int) -> Cause | None:
    """A wrong token or position among what the graph was given."""
    kind: Kind
    if reads_positions(mine.seen):
        kind, given, right = "position", position_ids(mine.graph), position_ids(alone.graph)
    elif "token_embd.weight" in _names(mine.seen):
        kind, given, right = "token", token_ids(mine.graph), token_ids(alone.graph)
    else:
        return None
    if given is None or right is None:
        return None
    one, other = given[mine.row(position)], right[alone.row(position)]
    if one == other:
        return None
    return Cause(kind, f"its {kind} is wrong: it is given {one}, not {other}", {"given": one, "right": other})


def _names(seen: Seen) -> list[str]:
    return [source.name for source in seen.sources if isinstance(source, Tensor)]


# -- recurrent states


def state(mine: Side, alone: Side) -> Cause | None:
    """Whether the recurrent state that the node starts from is another; None where it starts from none."""
    theirs = dict(_all_states(alone))
    agree = None
    for base, here in _all_states(mine):
        right = theirs.get(base)
        if right is None or here[0].shape[1] != right[0].shape[1]:
            continue
        index = mine.ubatch.rows[0] * len(mine.ubatch.slots) // mine.ubatch.count
        used, wanted = here[1][min(index, len(here[1]) - 1)], right[1][0]
        if distances(here[0][used][None], right[0][wanted][None])[0] <= _SAME_STATE:
            agree = AGREE
            continue
        elsewhere = np.flatnonzero(same_lines(right[0][wanted][None], here[0], _SAME_STATE)[0])
        said = f"the recurrent state it starts from ({base}, cell {used}) is not what the slot has seen"
        if len(elsewhere):
            said += f": that is in cell {elsewhere[0]}"
        return Cause(
            "state", said, {"tensor": base, "cell": int(used), "right_cells": [int(cell) for cell in elsewhere]}
        )
    return agree


def _all_states(side: Side) -> Iterator[tuple[str, tuple[Values, list[int]]]]:
    for seen, place, base in side.reads():
        states = _states(seen, place) if base.startswith(_STATES) else None
        if states is not None:
            yield base, states


def _states(seen: Seen, place: int) -> tuple[Values, list[int]] | None:
    """The states of a memory, a line a cell, and which of them a node takes; None where it takes none."""
    ids = [copied for copied in seen.inputs.values() if copied.dtype.kind == "i" and copied.size]
    copied = seen.inputs[place]
    if not ids or copied.dtype.kind == "i" or copied.size == 0:
        return None
    axis = 3 if copied.ndim > 3 and copied.shape[3] > 1 else (1 if copied.shape[2] == copied.shape[3] == 1 else 3)
    return np.moveaxis(copied, axis, 0).reshape(copied.shape[axis], -1), [int(cell) for cell in ids[0].ravel()]


def kernel(mine: Side) -> Cause:
    """Nothing that the node reads differs: what it computes does. Or not all that it reads could be compared."""
    memory = any(base.startswith((*CELLS, *_STATES)) for _, _, base in mine.reads())
    if len(mine.through) == 1 and not memory:
        return AGREE
    return Cause("unknown", "some of its inputs could not be compared")
