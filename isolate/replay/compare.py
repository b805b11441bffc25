"""Two graphs of one model, node by node: how far each row of a slot is off, where both are about the same tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from isolate.replay.rows import Ubatch, distances, of_outputs, over_cells, picks, that_matter
from isolate.trace.tensors import Graph, Seen, Values

_NUMBERED = re.compile(r"\b(?:node|leaf)_\d+")


@dataclass(frozen=True)
class Pair:
    """A node of the case, the same node of the slot alone, and how far each of the slot's rows is off; None: not compared."""

    node: int
    alone: int
    far: Values | None
    #: positions of the rows
    positions: tuple[int, ...] = ()


def compare(mine: Graph, ubatch: Ubatch, theirs: Graph, other: Ubatch) -> Iterator[Pair]:
    """Nodes of two graphs, in order, with the distance of the slot's rows where both are about the same tokens."""
    cells, outputs, matter = over_cells(mine), of_outputs(mine), that_matter(mine)
    for node, alone in align(mine, theirs):
        one, two = mine.nodes[node], theirs.nodes[alone]
        if cells[node] or not matter[node] or one.values is None or two.values is None:
            yield Pair(node, alone, None)
            continue
        yield _pair(one, two, ubatch, other, outputs[node])


def _pair(one: Seen, two: Seen, ubatch: Ubatch, other: Ubatch, outputs: bool) -> Pair:
    assert one.values is not None and two.values is not None
    best, positions = None, ubatch.positions
    same = one.tensor.shape == two.tensor.shape
    for pick in picks(one.tensor.shape, two.tensor.shape, ubatch, other, outputs):
        far = distances(pick.take(one.values, pick.mine), pick.take(two.values, pick.theirs))
        # Rows of one shape are those along which the difference is not spread; of two shapes, those that fit.
        if best is None or (far.max() > best.max() if same else far.max() < best.max()):
            best, positions = far, _places(ubatch, pick.mine, len(far))
    return Pair(one.index, two.index, best, positions)


def _places(ubatch: Ubatch, rows: Sequence[int], count: int) -> tuple[int, ...]:
    """The positions of rows that were taken; the newest where a row stands for all of the slot."""
    if tuple(rows) == ubatch.rows:
        return ubatch.positions
    if tuple(rows) == ubatch.output_rows:
        return tuple(sorted(ubatch.output_positions))
    return (ubatch.positions[-1],) * count


def align(mine: Graph, theirs: Graph) -> Iterator[tuple[int, int]]:
    """The nodes that are the same in two graphs of one model."""
    one, other = [_key(seen) for seen in mine.nodes], [_key(seen) for seen in theirs.nodes]
    if one == other:
        yield from zip(range(len(one)), range(len(other)), strict=True)
        return
    for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        yield from ((block.a + index, block.b + index) for index in range(block.size))


def _key(seen: Seen) -> tuple[str, str]:
    return seen.tensor.op, _NUMBERED.sub("node", seen.tensor.name)
