"""Is there room for the last batch of a case? Where there is none, a decode that says so is right."""

from __future__ import annotations

from msgspec import UNSET

from isolate.case import Case, Checkpoint, Context, Decode, Load, Reopen, Restore, Save
from isolate.search.without import slot_cells
from isolate.steps import ends_after


def overfull(case: Case) -> bool:
    """The last step decodes more tokens than there may be cells for. A hole in a slot is taken to be filled."""
    context, ends = case.context, dict[int, int]()
    kept: dict[str, tuple[int, int]] = {}
    over = False
    for step in case.steps:
        over = False
        match step:
            case Decode():
                grown = dict(ends)
                for run in step.batch:
                    start = run.at if isinstance(run.at, int) else grown.get(run.slot, 0)
                    grown[run.slot] = start + run.count()
                over = _over(grown, context)
                if step.returns is UNSET or step.returns == 0:
                    ends = grown
            case Checkpoint() | Save():
                kept[step.name] = step.slot, ends.get(step.slot, 0)
            case Restore() | Load():
                slot, end = kept[step.name]
                ends[step.slot if isinstance(step.slot, int) else slot] = end
            case Reopen():
                context, ends = step.context, {}
            case _:
                ends = ends_after(ends, step)
    return over


def _over(ends: dict[int, int], context: Context) -> bool:
    if context.kv_unified:
        return sum(ends.values()) > slot_cells(context)
    return max(ends.values(), default=0) > slot_cells(context)
