"""What a case has tried: a set of small facts, so that a case that tried something new is kept and changed further.

Facts about steps: what followed what, on the same slot or on another; how a batch fills its ubatches and who is in it. About
the cache: how full, and in how many pieces, when a step came. Where launches are seen, which kernel ran with about how
many blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from isolate.case import Case, Clear, Decode, Load, Restore, SeqAdd, SeqCp, SeqKeep, SeqRm, Step
from isolate.steps import ends_after

Fact = tuple[object, ...]


def facts(case: Case, steps: int) -> set[Fact]:
    """What the first `steps` steps of a case tried."""
    return set(_facts(case, case.steps[:steps]))


def _facts(case: Case, steps: list[Step]) -> Iterator[Fact]:
    context = case.context
    memory = case.model.zoo, context.kv_unified, context.swa_full
    cells = _Cells(context.n_ctx, context.n_seq_max)
    last: Step | None = None
    last_of: dict[int, str] = {}
    for step in steps:
        slots = _slots(step)
        word = _word(step)
        if last is not None:
            together = "same" if slots & _slots(last) else "other"
            yield "follows", _word(last), word, together, cells.state()
        for slot in slots:
            yield "slot", last_of.get(slot, ""), word, memory
            last_of[slot] = word
        if isinstance(step, Decode):
            total = sum(run.count() for run in step.batch)
            tail = total % context.n_ubatch
            shape = min(3, -(-total // context.n_ubatch)), min(4, tail) if tail < 4 else 5 if tail < 9 else 9
            yield "batch", shape, min(3, len(step.batch)), _word(last) if last else "", memory
        cells.follow(step)
        last = step


def _slots(step: Step) -> set[int]:
    if isinstance(step, Decode):
        return {run.slot for run in step.batch}
    return {slot for slot in (getattr(step, "slot", None), getattr(step, "into", None)) if isinstance(slot, int)}


def _word(step: Step) -> str:
    """The step's kind, with what part of a slot it takes."""
    if isinstance(step, SeqRm | SeqCp | SeqAdd):
        return f"{step.kind} {'' if step.p0 <= 0 else 'from'}{'' if step.p1 < 0 else 'to'}"
    if isinstance(step, Decode):
        return f"decode {min(3, len(step.batch))}"
    return step.kind


class _Cells:
    """Roughly how full the cache is, and how often something was taken out of its middle."""

    def __init__(self, cells: int, slots: int) -> None:
        self.cells = cells
        self.ends: dict[int, int] = {}
        self.holes = 0

    def follow(self, step: Step) -> None:
        if isinstance(step, Decode):
            for run in step.batch:
                self.ends[run.slot] = self.ends.get(run.slot, 0) + run.count()
        elif isinstance(step, Clear | SeqKeep):
            self.holes = 0
        elif isinstance(step, SeqRm | SeqCp | SeqAdd | Load | Restore):
            self.holes += 1
        self.ends = ends_after(self.ends, step)

    def state(self) -> tuple[int, int]:
        """Quarters that are filled; pieces, in classes."""
        fill = min(4, 4 * sum(self.ends.values()) // self.cells)
        return fill, 0 if self.holes == 0 else 1 if self.holes < 3 else 2 if self.holes < 9 else 3
