"""Decodes with every node's values copied: the faulting one of a case, and the slot's tokens of it decoded alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from isolate.case import Case
from isolate.library.bind import Library
from isolate.replay import cells, rows
from isolate.replay.alone import NotAlone, Single
from isolate.replay.batch import Fed
from isolate.replay.engine import Engine, Result, Row
from isolate.replay.loaded import Models
from isolate.replay.reference import Act, Decoded, Kind, Moved, Reference, Slot
from isolate.replay.rows import Ubatch
from isolate.trace.ring import Writer
from isolate.trace.tensors import Graph, Recorder, Tensors, Values

#: (place of a graph, node in it) whose inputs are copied too.
Wanted = frozenset[tuple[int, int]]

#: Tokens decoded one by one where they are to go in small parts; longer runs go in larger ones.
_ONE_BY_ONE = 256
_UNEVEN = (5, 8, 3, 16)


@dataclass(frozen=True)
class Run:
    """A decode that was recorded: its graphs with tokens, and the slot's rows in each."""

    graphs: list[Graph]
    ubatches: list[Ubatch]
    #: rows of logits as they were handed out, and which they are
    logits: list[tuple[Row, Values]]
    #: the slot's positions in each cache, in the order of its cells, once the decode was done; None where its state cannot be
    #: read. Of the slot alone first those it should have, then these.
    held: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class Parts:
    """How the slot alone gets its tokens: what noise is measured with."""

    #: sizes of the parts in which what came before is decoded, over and over; none: as large as a batch may be
    before: tuple[int, ...] = ()
    #: tokens from before that are decoded together with the first of the faulting decode
    wider: int = 0
    #: where it is moved from, for a slot that was moved
    nudge: int = 0


class Recordings:
    """Runs one case up to a step, and one of its slots alone. `room`: positions that a slot has."""

    def __init__(
        self,
        library: Library,
        writer: Writer,
        models: Models,
        case: Case,
        step: int,
        number: int,
        reference: Callable[[], Reference],
        room: int,
        also: Callable[[int, bool, int], bool] | None = None,
    ) -> None:
        """`reference` makes an empty one; `also` is called for each node, before it is looked at."""
        self.library = library
        self.writer = writer
        self.models = models
        self.case = case
        self.step = step
        self.number = number
        self.reference = reference
        self.room = room
        self.also = also
        self.tensors = Tensors(library)
        self.settings = case.context
        self.slot = Slot()

    def of_case(self, wanted: Wanted = frozenset()) -> Run:
        """The case up to the step, which is recorded. StepFailed where it ends before."""
        recorder = Recorder(self.tensors, wanted, self.also)
        engine = Engine(self.library, self.writer, self.models, self.case, recorder.callback)
        reference = self.reference()
        try:
            engine.open()
            recorder.on = self.step == 0
            for index, step, result in engine.steps():
                reference.after(step, result)
                recorder.on = index == self.step - 1
                if index == self.step:
                    self.settings, self.slot = engine.settings, reference.slot(self.number)
                    return self._of_case(engine, recorder.taken(), result)
        finally:
            engine.close()
            engine.forget()
        raise NotAlone("the case ended before the step that failed")

    def _of_case(self, engine: Engine, graphs: list[Graph], result: Result) -> Run:
        ubatches = rows.ubatches(graphs, result.fed, self.number)
        known = [(graph, ubatch) for graph, ubatch in zip(graphs, ubatches, strict=True) if ubatch is not None]
        logits = [(row, view.copy()) for row in result.rows if (view := engine.logits(row)) is not None]
        assert engine.context is not None
        return Run(
            [graph for graph, _ in known],
            [ubatch for _, ubatch in known],
            logits,
            held(self.library, engine.context, self.number, self.reference().kind),
        )

    def alone(
        self, case: Run, parts: Parts | None = None, wanted: Wanted = frozenset(), model: int | None = None
    ) -> Run:
        """What the slot went through, alone; a graph for each of the case's in which it has rows, and the same rows."""
        parts = parts or Parts()
        recorder = Recorder(self.tensors, wanted, self.also)
        single = Single(self.library, model or self.models.handle or 0, self.settings, self.room, recorder.callback)
        try:
            wide, last = self._runs(case, parts.wider)
            for act in self._acts(last, wide[0].start, parts.nudge):
                _go_through(single, act, parts.before)
            recorder.on = True
            mine = [ubatch for ubatch in case.ubatches if ubatch.rows]
            for run, ubatch in zip(wide, mine, strict=True):
                tokens, start = last.tokens[run.start : run.stop], last.positions[run.start]
                single.decode(tokens, start, set(ubatch.output_positions))
            graphs = recorder.taken()
            kept = held(self.library, single.context, 0, self.reference().kind)
        finally:
            single.close()
        if len(graphs) != len(wide):
            raise NotAlone(f"alone it was computed in {len(graphs)} parts, not {len(wide)}")
        ubatches = []
        for graph, run, ubatch in zip(graphs, wide, mine, strict=True):
            (found,) = rows.ubatches([graph], [_fed(last, run)], 0)
            if found is None:
                raise NotAlone("its graphs do not begin with token ids")
            count = len(ubatch.rows)
            ubatches.append(replace(found, rows=found.rows[-count:], positions=found.positions[-count:]))
        return Run(graphs, ubatches, [], (self.slot.positions, *(kept or ())))

    def widest(self, case: Run, most: int) -> int:
        """Tokens, at most so many, that can be decoded together with the slot's first ones of the case's decode."""
        wide, _ = self._runs(case, 0)
        return max(0, min(most, wide[0].start, self.settings.n_ubatch - len(wide[0])))

    def _runs(self, case: Run, wider: int) -> tuple[list[range], Decoded]:
        """Which tokens of the slot's last run each ubatch of the case had, and that run."""
        counts = [len(ubatch.rows) for ubatch in case.ubatches if ubatch.rows]
        acts = self.slot.acts()
        last = acts[-1] if acts else None
        if not counts or not isinstance(last, Decoded) or sum(counts) > len(last.tokens):
            raise NotAlone("its rows were not found in what was computed")
        at = len(last.tokens) - sum(counts)
        runs = []
        for count in counts:
            runs.append(range(at, at + count))
            at += count
        runs[0] = range(runs[0].start - wider, runs[0].stop)
        return runs, last

    def _acts(self, last: Decoded, first: int, nudge: int) -> list[Act]:
        acts: list[Act] = list(self.slot.acts()[:-1])
        if first:
            acts.append(Decoded(last.tokens[:first], last.positions[:first]))
        if nudge and acts:
            acts = [_nudged(act, nudge) for act in acts]
            acts.append(Moved(0, self.room, -nudge))
        return acts


def held(library: Library, context: int, slot: int, kind: Kind) -> tuple[tuple[int, ...], ...] | None:
    """The positions of a slot in each cache, in the order of its cells, by its state; None where that cannot be read."""
    caches = {"attention": 1, "window": 2, "hybrid": 1}.get(kind, 0)
    data = ctypes.create_string_buffer(max(1, library.llama_state_seq_get_size(context, slot)))
    moved = library.llama_state_seq_get_data(context, data, len(data), slot)
    state = cells.read(data.raw[:moved], caches, kind == "hybrid") if caches else None
    return None if state is None else state.stored


def small(count: int) -> tuple[int, ...]:
    """Parts of one token, or of some where there are many."""
    return (1,) if count <= _ONE_BY_ONE else (max(2, count // _ONE_BY_ONE),)


def uneven() -> tuple[int, ...]:
    """Parts of all sorts."""
    return _UNEVEN


def _go_through(single: Single, act: Act, parts: Sequence[int]) -> None:
    if not isinstance(act, Decoded) or not parts:
        single.act(act)
        return
    at = 0
    for part in cycle(parts):
        if at >= len(act.tokens):
            return
        tokens = act.tokens[at : at + part]
        single.decode(tokens, act.positions[at], set())
        at += len(tokens)


def _nudged(act: Act, by: int) -> Act:
    match act:
        case Decoded():
            return Decoded(act.tokens, tuple(position + by for position in act.positions))
        case Moved():
            return replace_moved(act, by)
        case _:
            return type(act)(act.p0 + by, act.p1 + by)


def replace_moved(act: Moved, by: int) -> Moved:
    """The same move, of cells that are elsewhere."""
    return Moved(act.p0 + by, act.p1 + by, act.delta)


def _fed(last: Decoded, run: range) -> Fed:
    import numpy as np

    return Fed(0, np.array(last.tokens[run.start : run.stop], np.int32), last.positions[run.start])
