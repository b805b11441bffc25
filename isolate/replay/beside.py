"""Where a wrong result begins: the faulting decode beside the same tokens of the slot alone, node by node.

The slot's rows of each node are compared. What is noise is measured: the slot alone once more, its tokens in batches of
other sizes. The first node beyond it is the one to name; what it reads tells what was wrong (`cause.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isolate.errors import IsolateError
from isolate.fault import Fault, Node
from isolate.replay import attended, cause
from isolate.replay.alone import NotAlone
from isolate.replay.compare import Pair, compare
from isolate.replay.engine import Engine, StepFailed
from isolate.replay.loaded import Models
from isolate.replay.recording import Parts, Recordings, Run, small, uneven
from isolate.replay.reference import Reference
from isolate.replay.rows import in_words
from isolate.trace.tensors import Graph, Seen, Tensor

#: Faults whose evidence names a slot and a position of a decode.
KINDS = ("logits", "nan")
#: A node differs when it is this many times further off than the slot alone in other batches.
TIMES = 100.0
#: Rounding of an F32 sum: no noise is taken to be less.
_ROUNDING = 1e-13
#: NMSE below which nothing differs; and the same as a share of the fault's own, but never more than this.
_LEAST, _SHARE, _SHARE_MOST = 1e-12, 1e-4, 1e-6
#: A distance that stands for a number that is none.
_NOT_FINITE = 1e30
#: Of two distances from the CPU's values, the shorter is right when the other is this many times longer.
_CLEARLY = 10.0
#: Tokens of before that are decoded with those of the faulting decode to measure noise.
_WIDER = 5
#: Where a slot that was moved is moved from to measure the noise of moving.
_NUDGE = 3

_LAYER = re.compile(r"-(\d+)(?: |$)|_l(\d+)|blk\.(\d+)\.")


@dataclass(frozen=True)
class First:
    """The first node that differs."""

    graph: int
    #: the graph's place among those of the slot alone
    place: int
    pair: Pair
    noise: float
    beyond: tuple[int, ...]

    @property
    def nmse(self) -> float:
        """The distance of the row that is furthest off."""
        assert self.pair.far is not None
        return float(self.pair.far.max())

    @property
    def worst(self) -> int:
        """The position of that row."""
        assert self.pair.far is not None
        return self.pair.positions[int(self.pair.far.argmax())]


def explain(
    engine: Engine,
    fault: Fault,
    reference: Callable[[], Reference],
    room: int,
    also: Callable[[int, bool, int], bool] | None = None,
    cpu: Models | None = None,
) -> Fault:
    """The fault of an oracle with the node where it begins, or with why none can be named.

    `room`: positions that a slot has. `also` is called for each node that is computed. `cpu`: the model once more, on the CPU, to
    tell which of the two is right there.
    """
    number, step = int(fault.evidence["slot"]), fault.step.index
    try:
        recordings = Recordings(
            engine.library, engine.writer, engine.models, engine.case, step or 0, number, reference, room, also
        )
        return _begins(recordings, fault, cpu)
    except StepFailed as failed:
        return without(fault, f"run again it fails otherwise: {failed.fault.explanation}")
    except IsolateError as error:
        return without(fault, error.message)
    except NotAlone as reason:
        return without(fault, str(reason))


def without(fault: Fault, why: str) -> Fault:
    """The fault, with why no node can be named."""
    return replace(fault, explanation=f"{fault.explanation}; no graph node to name: {why}")


def _begins(recordings: Recordings, fault: Fault, cpu: Models | None) -> Fault:
    case = recordings.of_case()
    if not case.graphs:
        return without(fault, "the graph does not begin with token ids")
    wrong_row = cause.handed_out(case, recordings.number)
    alone = recordings.alone(case)
    first = _first(case, alone, _noise(recordings, case, alone), fault.evidence.get("nmse"))
    if first is None and wrong_row is not None:
        said = f"{fault.explanation}; no graph node differs: {wrong_row.said}"
        begins = {"cause": wrong_row.kind, **wrong_row.evidence}
        return replace(fault, explanation=said, evidence={**fault.evidence, "begins": begins})
    if first is None:
        left = sum(graph.left for graph in case.graphs)
        some = f" ({left} were too large to be kept)" if left else ""
        return without(fault, f"evaluated node by node, none of those that can be compared differs{some}")
    why = _why(recordings, case, alone, first)
    begins = {"cause": why.kind, **_numbers(case, first, recordings.number), "inputs": why.evidence}
    said = _said(case, first, recordings.number, why)
    if wrong_row is not None:
        said += f"; also {wrong_row.said}"
    if cpu is not None:
        begins["cpu"] = _on_cpu(recordings, case, alone, first, cpu)
        said += f"; {begins['cpu'].pop('said')}"
    node = _node(case.graphs[first.graph].nodes[first.pair.node], case.graphs[first.graph])
    return replace(
        fault, explanation=f"{fault.explanation}; {said}", node=node, evidence={**fault.evidence, "begins": begins}
    )


# -- comparing


def _first(case: Run, alone: Run, noise: Sequence[dict[int, float]], nmse: float | None) -> First | None:
    """The first node whose rows are beyond noise. `noise`: for each graph of the slot alone, by its nodes."""
    least = max(_LEAST, min(_SHARE * nmse if nmse is not None else _SHARE_MOST, _SHARE_MOST))
    for place, graph in enumerate(_having(case)):
        for pair in compare(case.graphs[graph], case.ubatches[graph], alone.graphs[place], alone.ubatches[place]):
            if pair.far is None:
                continue
            level = noise[place].get(pair.alone, 0.0)
            beyond = pair.far > max(TIMES * level, least)
            if beyond.any():
                positions = tuple(at for at, off in zip(pair.positions, beyond, strict=True) if off)
                return First(graph, place, pair, level, positions)
    return None


def _having(case: Run) -> list[int]:
    """The graphs in which the slot has rows."""
    return [graph for graph, ubatch in enumerate(case.ubatches) if ubatch.rows]


def _noise(recordings: Recordings, case: Run, alone: Run) -> list[dict[int, float]]:
    """For each graph of the slot alone: how far each node moves when its tokens come in other batches."""
    before = len(recordings.slot.tokens)
    wider = recordings.widest(case, _WIDER)
    variants = [Parts(small(before)), Parts(uneven(), wider)]
    if recordings.slot.moved and recordings.slot.history is None:
        variants.append(Parts(nudge=_NUDGE))
    level: list[dict[int, float]] = [{} for _ in alone.graphs]
    for parts in variants:
        try:
            run = recordings.alone(case, parts)
        except NotAlone:
            # there may be no room to move it
            continue
        for place, graph in enumerate(alone.graphs):
            for pair in compare(run.graphs[place], run.ubatches[place], graph, alone.ubatches[place]):
                if pair.far is not None:
                    level[place][pair.alone] = max(level[place].get(pair.alone, 0.0), float(pair.far.max()))
    return level


# -- telling


def _why(recordings: Recordings, case: Run, alone: Run, first: First) -> cause.Cause:
    """What the node read, from both runs once more."""
    graph, other = case.graphs[first.graph], alone.graphs[first.place]
    pairs = list(compare(graph, case.ubatches[first.graph], other, alone.ubatches[first.place]))
    compared = [False] * len(graph.nodes)
    for pair in pairs:
        compared[pair.node] = pair.far is not None
    same = {pair.node: pair.alone for pair in pairs}
    mine = cause.through(graph, first.pair.node, compared)
    theirs = tuple(same[node] for node in mine if node in same)
    again = recordings.of_case(frozenset((first.graph, node) for node in mine))
    beside = recordings.alone(case, None, frozenset((first.place, node) for node in theirs))
    return _judged(
        cause.Side(again.graphs[first.graph], first.pair.node, mine, case.ubatches[first.graph], again.held),
        cause.Side(beside.graphs[first.place], first.pair.alone, theirs, alone.ubatches[first.place], beside.held),
        first.worst,
        recordings.settings.type_k,
    )


def _judged(mine: cause.Side, alone: cause.Side, position: int, cache: str) -> cause.Cause:
    return (
        cause.numbers(mine, alone, position)
        or attended.judge(mine, alone, position, cache)
        or cause.state(mine, alone)
        or cause.kernel(mine)
    )


def _on_cpu(recordings: Recordings, case: Run, alone: Run, first: First, cpu: Models) -> dict[str, Any]:
    """How far either side is off from what the CPU computes for the slot alone, at the first node from there on that it has."""
    try:
        right = recordings.alone(case, model=cpu.handle)
    except NotAlone as reason:
        return {"said": f"on the CPU it was not computed: {reason}"}
    graph, ubatch = right.graphs[first.place], right.ubatches[first.place]
    found: list[dict[int, float]] = []
    for run, place in ((case, first.graph), (alone, first.place)):
        pairs = list(compare(run.graphs[place], run.ubatches[place], graph, ubatch))
        start = first.pair.node if run is case else first.pair.alone
        later = (pair for pair in pairs if pair.node >= start)
        found.append({pair.alone: float(pair.far.max()) for pair in later if pair.far is not None})
    both = sorted(found[0].keys() & found[1].keys())
    if not both:
        return {"said": "the CPU's graph has none of these nodes"}
    node = both[0]
    in_case, in_alone = found[0][node], found[1][node]
    name = graph.nodes[node].tensor.name
    said = f"from what the CPU computes (its {name}) it is {in_case:.1e} off in the case and {in_alone:.1e} alone"
    if max(in_case, in_alone) > _CLEARLY * min(in_case, in_alone):
        said += f", so {'the slot alone' if in_alone < in_case else 'the case'} is right"
    return {"said": said, "name": name, "case": in_case, "alone": in_alone}


def _numbers(case: Run, first: First, number: int) -> dict[str, Any]:
    seen = case.graphs[first.graph].nodes[first.pair.node]
    return {
        "node": seen.index,
        "op": seen.tensor.op,
        "name": seen.tensor.name,
        "layer": _layer(case.graphs[first.graph], seen.index),
        "ubatch": first.place + 1,
        "ubatches": len(_having(case)),
        "slot": number,
        "positions": list(first.beyond),
        "nmse": first.nmse if first.nmse < _NOT_FINITE else None,
        "noise": first.noise,
        "times_the_noise": first.nmse / max(first.noise, _ROUNDING) if first.nmse < _NOT_FINITE else None,
    }


def _said(case: Run, first: First, number: int, why: cause.Cause) -> str:
    told = _numbers(case, first, number)
    layer = "" if told["layer"] is None else f" of layer {told['layer']}"
    part = f", ubatch {told['ubatch']} of {told['ubatches']}" if told["ubatches"] > 1 else ""
    far = "not finite"
    if told["nmse"] is not None:
        far = f"{first.nmse:.1e} (NMSE) off, {told['times_the_noise']:.2g} times its noise"
    rows = in_words(first.beyond)
    verb = "is" if len(first.beyond) == 1 else "are"
    return (
        f"it begins at graph node {told['node']}, {told['op']} {told['name']}{layer}{part}: "
        f"{rows} of slot {number} {verb} {far}; {why.said}"
    )


def _layer(graph: Graph, node: int) -> int | None:
    """The layer, by the names of the node and its weights, or of the nearest before it."""
    for seen in graph.nodes[node::-1]:
        names = [seen.tensor.name, *(source.name for source in seen.sources if isinstance(source, Tensor))]
        for name in names:
            found = _LAYER.search(name)
            if found:
                return int(next(group for group in found.groups() if group))
    return None


def _node(seen: Seen, graph: Graph) -> Node:
    names = (source.name if isinstance(source, Tensor) else graph.nodes[source].tensor.name for source in seen.sources)
    tensor = seen.tensor
    return Node(seen.index, tensor.op, tensor.name, tensor.type, tensor.shape, tuple(names))
