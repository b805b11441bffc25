"""Which rows of what a graph computed are one slot's: of its ubatch, and of each node by its shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isolate.replay.batch import Fed
from isolate.trace.tensors import LAST, Graph, Seen, Tensor, Values, is_cache

#: Node operations that read all cells of attention at once and give a row a token.
_OVER_CELLS = "FLASH_ATTN_EXT"
#: Dimensions that rows may go along: one, or two that count as one.
_DIMENSIONS = [(axis, second) for axis in range(4) for second in (None, *range(axis + 1, 4))]


@dataclass(frozen=True)
class Ubatch:
    """The rows of one graph, and which of them are the slot's."""

    #: token rows of the graph
    count: int
    #: the slot's rows, and their positions
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    #: slots that it has tokens of, in order
    slots: tuple[int, ...]
    #: rows that give logits, as token rows of the graph
    outputs: tuple[int, ...]

    @property
    def output_rows(self) -> tuple[int, ...]:
        """The slot's rows among those that give logits."""
        return tuple(place for place, row in enumerate(self.outputs) if row in self.rows)

    @property
    def output_positions(self) -> frozenset[int]:
        """Positions of the slot that give logits."""
        place = dict(zip(self.rows, self.positions, strict=True))
        return frozenset(place[row] for row in self.outputs if row in place)


@dataclass
class Pending:
    """A slot's tokens of a batch that no ubatch had yet."""

    slot: int
    tokens: deque[tuple[int, int]]


def ubatches(graphs: Sequence[Graph], fed: Sequence[Fed], slot: int) -> list[Ubatch | None]:
    """For each graph of a decode of these runs, which rows are the slot's; None for a graph that has no tokens."""
    pending: dict[int, Pending] = {}
    for run in fed:
        tokens = ((int(token), run.start + index) for index, token in enumerate(run.tokens))
        pending.setdefault(run.slot, Pending(run.slot, deque())).tokens.extend(tokens)
    return [_ubatch(graph, list(pending.values()), slot) for graph in graphs]


def _ubatch(graph: Graph, pending: list[Pending], slot: int) -> Ubatch | None:
    tokens = token_ids(graph)
    if tokens is None:
        return None
    positions = position_ids(graph)
    owners: list[tuple[int, int]] = []
    current: Pending | None = None
    for row, token in enumerate(tokens):
        at = None if positions is None else positions[row]
        current = _owner(pending, current, token, at)
        if current is None:
            return None
        owners.append((current.slot, current.tokens.popleft()[1]))
    mine = [(row, position) for row, (owner, position) in enumerate(owners) if owner == slot]
    return Ubatch(
        len(tokens),
        tuple(row for row, _ in mine),
        tuple(position for _, position in mine),
        tuple(dict.fromkeys(owner for owner, _ in owners)),
        _outputs(graph, len(tokens)),
    )


def _owner(pending: list[Pending], current: Pending | None, token: int, position: int | None) -> Pending | None:
    """Whose token comes next in a ubatch: a slot keeps the order of its tokens and, where it can, its rows together."""
    having = [each for each in pending if each.tokens]
    same = [each for each in having if each.tokens[0][0] == token]
    exact = [each for each in same if position in (None, each.tokens[0][1])]
    for choice in (exact, same, having):
        if choice:
            return next((each for each in choice if each is current), choice[0])
    return None


def _input(seen: Seen, place: int) -> list[int] | None:
    """Whole numbers that a node has as its source at this place, where no node computed them."""
    values = seen.inputs.get(place)
    if values is None or values.dtype.kind != "i" or not isinstance(seen.sources[place], Tensor):
        return None
    return [int(value) for value in values.ravel()]


def token_ids(graph: Graph) -> list[int] | None:
    """The token ids that a graph begins with."""
    for seen in graph.nodes:
        if seen.tensor.op == "GET_ROWS" and _called(seen.sources[0], "token_embd.weight"):
            return _input(seen, 1)
    return None


def position_ids(graph: Graph) -> list[int] | None:
    """The positions that a graph is given; the first of each token where the model has several."""
    for seen in graph.nodes:
        if reads_positions(seen):
            return _input(seen, 1)
    return None


def reads_positions(seen: Seen) -> bool:
    """The node turns its input by positions, or looks positions up."""
    if seen.tensor.op == "GET_ROWS":
        return _called(seen.sources[0], "position_embd.weight")
    # a shift of keys turns the cache
    return seen.tensor.op.startswith("ROPE") and not is_cache(seen.tensor.base) and _input(seen, 1) is not None


def _outputs(graph: Graph, count: int) -> tuple[int, ...]:
    for seen in graph.nodes:
        ids = _taken(graph, seen)
        if ids is not None and graph.nodes[_first(seen)].tensor.shape[1] == count:
            return tuple(ids[: seen.tensor.shape[1]]) if seen.tensor.shape[1] else ()
    return tuple(range(count))


def _first(seen: Seen) -> int:
    source = seen.sources[0]
    assert isinstance(source, int)
    return source


def _taken(graph: Graph, seen: Seen) -> list[int] | None:
    """Rows that a node takes of one computed before, as the graph's inputs say; None where it does something else."""
    if seen.tensor.op != "GET_ROWS" or not isinstance(seen.sources[0], int):
        return None
    return None if is_cache(graph.nodes[seen.sources[0]].tensor.base) else _input(seen, 1)


def of_outputs(graph: Graph) -> list[bool]:
    """For each node: whether its rows are those that give logits, no longer all."""
    found: list[bool] = []
    for seen in graph.nodes:
        after = any(found[source] for source in seen.sources if isinstance(source, int))
        found.append(after or _taken(graph, seen) is not None)
    return found


def _called(source: int | Tensor, name: str) -> bool:
    return isinstance(source, Tensor) and source.name == name


def over_cells(graph: Graph) -> list[bool]:
    """For each node: whether one of its dimensions goes over cells of attention, whose order is each context's own."""
    found: list[bool] = []
    for seen in graph.nodes:
        cells = [_is_cells(graph, found, source) for source in seen.sources]
        if seen.tensor.op == _OVER_CELLS or (seen.tensor.op == "MUL_MAT" and all(cells[:2])):
            found.append(False)
        else:
            found.append(any(cells) or _named_cells(seen.tensor))
    return found


def that_matter(graph: Graph) -> list[bool]:
    """For each node: whether logits or the memory depend on it. Some graphs compute what nobody reads."""
    ends = [seen.index for seen in graph.nodes if seen.tensor.name == LAST or is_cache(seen.tensor.base)]
    if graph.named(LAST) is None:
        return [True] * len(graph.nodes)
    found = [False] * len(graph.nodes)
    while ends:
        index = ends.pop()
        if not found[index]:
            found[index] = True
            ends += [source for source in graph.nodes[index].sources if isinstance(source, int)]
    return found


def _is_cells(graph: Graph, found: list[bool], source: int | Tensor) -> bool:
    return found[source] if isinstance(source, int) else _named_cells(source)


def _named_cells(tensor: Tensor) -> bool:
    return tensor.base.startswith(("cache_k", "cache_v")) or "kq_mask" in tensor.base.lower()


def picks(
    shape: Sequence[int], alone: Sequence[int], ubatch: Ubatch, other: Ubatch, outputs: bool = False
) -> Iterator[Pick]:
    """Ways to take the slot's rows out of a node of one graph, and out of the same node in a graph of the slot alone.

    `shape` and `alone` are the node's shapes in the two; `outputs`: its rows are those that give logits. Dimensions of rows,
    of tokens a sequence and sequences; where there are none, of sequences alone, or the whole node where all its rows are the slot's.
    """
    mine, theirs, count, their_count = ubatch.rows, other.rows, ubatch.count, other.count
    if outputs:
        mine, theirs = ubatch.output_rows, other.output_rows
        count, their_count = len(ubatch.outputs), len(other.outputs)
    found = False
    if mine and len(mine) == len(theirs):
        for axis, second in _DIMENSIONS:
            rest = all(shape[at] == alone[at] for at in range(4) if at not in (axis, second))
            two = second is not None and shape[second] == 1
            if rest and not two and _size(shape, axis, second) == count and _size(alone, axis, second) == their_count:
                found = True
                yield Pick(axis, second, mine, theirs)
    if found:
        return
    if len(ubatch.slots) > 1 and len(other.slots) == 1:
        index = ubatch.rows[0] * len(ubatch.slots) // ubatch.count
        for axis in range(4):
            rest = all(shape[at] == alone[at] for at in range(4) if at != axis)
            if rest and alone[axis] == 1 and shape[axis] == len(ubatch.slots):
                yield Pick(axis, None, (index,), (0,))
    if tuple(shape) == tuple(alone) and ubatch.rows == other.rows and ubatch.count == other.count:
        yield Pick(None, None, (), ())


@dataclass(frozen=True)
class Pick:
    """Rows along one dimension, or along two that count as one; None is the whole node as one row."""

    axis: int | None
    second: int | None
    mine: tuple[int, ...]
    theirs: tuple[int, ...]

    def take(self, values: Values, rows: Sequence[int]) -> Values:
        """These rows: one a line."""
        if self.axis is None:
            return values.reshape(1, -1)
        if self.second is None:
            taken = np.moveaxis(values, self.axis, 0)[list(rows)]
        else:
            moved = np.moveaxis(values, (self.axis, self.second), (0, 1))
            size = moved.shape[0]
            taken = np.stack([moved[row % size, row // size] for row in rows])
        return taken.reshape(len(rows), -1)


def _size(shape: Sequence[int], axis: int, second: int | None) -> int:
    return shape[axis] * (1 if second is None else shape[second])


def distances(mine: Values, theirs: Values) -> Values:
    """NMSE of each row from the other's; the largest number where either is not finite."""
    one, other = theirs.astype(np.float64), mine.astype(np.float64)
    with np.errstate(all="ignore"):
        power, own = np.einsum("ij,ij->i", one, one), np.einsum("ij,ij->i", other, other)
        error = one - other
        # what should be all zeros is off by all that it is
        power = np.where(power > 0, power, own)
        found = np.einsum("ij,ij->i", error, error) / np.where(power == 0, 1.0, power)
    return np.where(np.isfinite(found), found, np.finfo(np.float32).max).astype(np.float32)


def same_lines(right: Values, cells: Values, limit: float) -> npt.NDArray[np.bool_]:
    """Which lines (second dimension) hold what each right line (first) holds."""
    one, other = right.astype(np.float64), cells.astype(np.float64)
    power = np.einsum("ij,ij->i", one, one)[:, None]
    far = power + np.einsum("ij,ij->i", other, other)[None] - 2 * one @ other.T
    found: npt.NDArray[np.bool_] = far <= np.maximum(limit * power, 1e-30)
    return found


def in_words(positions: Sequence[int]) -> str:
    """Positions in words, runs of them as one."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    shown = ", ".join(words[:6]) + (", ..." if len(words) > 6 else "")
    return f"position{'s' if len(positions) != 1 else ''} {shown}"
