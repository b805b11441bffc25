"""How a case without something is made: each function gives a valid smaller case, or None where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from isolate import case as cases_of
from isolate.case import Case, Checkpoint, Context, Decode, Load, Pattern, Reopen, Restore, Run, Save, Step
from isolate.errors import CaseError

#: llama.cpp makes the cells of a cache in units of this many (n_ctx is rounded up to it).
CELLS = 256


def slots(case: Case) -> list[int]:
    """Slots that the case uses, in order."""
    used: set[int] = set()
    for step in case.steps:
        if isinstance(step, Decode):
            used |= {run.slot for run in step.batch}
        used |= {getattr(step, name) for name in ("slot", "into") if isinstance(getattr(step, name, None), int)}
    return sorted(used - {-1})


def with_steps(case: Case, steps: Sequence[Step]) -> Case | None:
    """The case with these steps, without those that need what is gone; None where none is left or it is not valid."""
    checkpoints: set[str] = set()
    saved: set[str] = set()
    with_logits: set[int] = set()
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, Checkpoint):
            checkpoints.add(step.name)
        elif isinstance(step, Save):
            saved.add(step.name)
        elif isinstance(step, Restore | Load):
            if step.name not in (checkpoints if isinstance(step, Restore) else saved):
                continue
        elif isinstance(step, Reopen):
            with_logits.clear()
        elif isinstance(step, Decode):
            batch = [
                cut(run, 1) if run.tokens == "greedy" and run.slot not in with_logits else run for run in step.batch
            ]
            with_logits |= {run.slot for run in batch if run.outputs()}
            step = step if batch == step.batch else replace(step, batch=batch)
        kept.append(step)
    return valid(replace(case, steps=kept)) if kept else None


def valid(case: Case) -> Case | None:
    try:
        return cases_of.parse(msgspec.json.encode(case), "candidate")
    except CaseError:
        return None


def contexts_of(case: Case) -> dict[int, Context]:
    """The settings of the context it begins with, at -1, and of those it is made again with, by their step."""
    return {-1: case.context} | {
        index: step.context for index, step in enumerate(case.steps) if isinstance(step, Reopen)
    }


def with_settings(case: Case, settings: dict[str, Any], place: int = -1) -> Case | None:
    """The case with other settings of the context at a place of `contexts_of`."""
    if place == -1:
        return valid(replace(case, context=replace(case.context, **settings)))
    steps = list(case.steps)
    step = steps[place]
    assert isinstance(step, Reopen)
    steps[place] = replace(step, context=replace(step.context, **settings))
    return valid(replace(case, steps=steps))


def slot_cells(context: Context) -> int:
    """Tokens that a slot has room for, or all slots together where they share one cache."""
    tokens = context.n_ctx if context.kv_unified else -(-context.n_ctx // context.n_seq_max)
    return -(-tokens // CELLS) * CELLS


def least_cells(case: Case) -> int:
    """The smallest n_ctx that can hold what the case decodes into its fullest slot, in whole units of cells for each slot."""
    tokens: dict[int, int] = {}
    for step in case.steps:
        for slot, count in step.tokens_by_slot().items():
            tokens[slot] = tokens.get(slot, 0) + count
    count = max(slots(case), default=0) + 1
    return -(-max(tokens.values(), default=1) // CELLS) * CELLS * count


def runs_of(case: Case, reverse: bool = False) -> Iterator[tuple[int, int]]:
    """Places of all runs: step and number in its batch; from the end on, a removal moves none that is still to come."""
    places = [(i, n) for i, step in enumerate(case.steps) if isinstance(step, Decode) for n in range(len(step.batch))]
    yield from reversed(places) if reverse else places


def with_run(case: Case, index: int, number: int, run: Run | None) -> Case | None:
    step = case.steps[index]
    assert isinstance(step, Decode)
    batch = [*step.batch[:number], *([run] if run else []), *step.batch[number + 1 :]]
    if not batch:
        return None
    return with_steps(case, [*case.steps[:index], replace(step, batch=batch), *case.steps[index + 1 :]])


def with_all_runs(case: Case, change: Callable[[Run], Run]) -> Case | None:
    decodes = (replace(s, batch=[change(run) for run in s.batch]) if isinstance(s, Decode) else s for s in case.steps)
    return with_steps(case, list(decodes))


def cut(run: Run, count: int) -> Run:
    """The run's first tokens, more of them counting on where it has fewer."""
    if isinstance(run.tokens, Pattern):
        tokens: Any = replace(run.tokens, count=count)
    else:
        tokens = run.tokens[:count] if isinstance(run.tokens, list) and run.tokens else [0] * count
    logits: Any = run.logits
    if isinstance(logits, list):
        logits = [index for index in logits if index < count] or "last"
    return replace(run, tokens=tokens, logits=logits)


def counting(count: int) -> Any:
    return list(range(count)) if count <= 8 else Pattern(count, 100)


def unlike_counting(run: Run) -> int:
    return 0 if run.tokens == counting(run.count()) else 1


def without_slot(case: Case, slot: int) -> Case | None:
    steps: list[Step] = []
    for step in case.steps:
        if isinstance(step, Decode):
            batch = [run for run in step.batch if run.slot != slot]
            steps += [replace(step, batch=batch)] if batch else []
        elif slot not in (getattr(step, "slot", None), getattr(step, "into", None)):
            steps.append(step)
    return with_steps(case, steps)


def on_one_slot(case: Case, slot: int) -> Case | None:
    steps: list[Step] = []
    for step in case.steps:
        if isinstance(step, Decode):
            count = sum(run.count() for run in step.batch)
            steps.append(replace(step, batch=[Run(slot, counting(count))]))
        elif getattr(step, "slot", slot) in (slot, UNSET) and getattr(step, "into", slot) == slot:
            steps.append(step)
    return with_steps(case, steps)


def on_slot_zero(case: Case) -> Case | None:
    """Every step on slot 0, with the tokens of a batch in one run; what is copied goes to slot 1."""
    steps: list[Step] = []
    for step in case.steps:
        if isinstance(step, Decode):
            steps.append(replace(step, batch=[Run(0, counting(sum(run.count() for run in step.batch)))]))
            continue
        named = {"slot": 0, "into": 1}
        steps.append(
            replace(step, **{name: new for name, new in named.items() if isinstance(getattr(step, name, None), int)})
        )
    return with_steps(case, steps)


def renumbered(case: Case) -> Case | None:
    """Slots 0, 1, ... in the order of their numbers."""
    new = {slot: number for number, slot in enumerate(slots(case))}
    steps: list[Step] = []
    for step in case.steps:
        if isinstance(step, Decode):
            steps.append(replace(step, batch=[replace(run, slot=new[run.slot]) for run in step.batch]))
            continue
        named = {name: getattr(step, name, None) for name in ("slot", "into")}
        steps.append(replace(step, **{name: new[slot] for name, slot in named.items() if slot in new}))
    return with_steps(case, steps)


def merged(case: Case, index: int) -> Case | None:
    """Two decodes as one, a run a slot; None where they are not two decodes."""
    first, second = case.steps[index], case.steps[index + 1] if index + 1 < len(case.steps) else None
    if not isinstance(first, Decode) or not isinstance(second, Decode):
        return None
    batch = list(first.batch)
    for run in second.batch:
        place = next((place for place, other in enumerate(batch) if other.slot == run.slot), None)
        if place is None:
            batch.append(run)
        else:
            batch[place] = Run(run.slot, counting(batch[place].count() + run.count()), at=batch[place].at)
    merged = replace(second, batch=batch)
    return with_steps(case, [*case.steps[:index], merged, *case.steps[index + 2 :]])


def sharing(case: Case, index: int, name: str) -> Case | None:
    """The restore or load at `index` takes the state called `name`; states that nobody takes any more are not made."""
    step = case.steps[index]
    assert isinstance(step, Restore | Load)
    steps: list[Step] = [*case.steps[:index], replace(step, name=name), *case.steps[index + 1 :]]
    taken = {other.name for other in steps if isinstance(other, Restore | Load)}
    return with_steps(
        case, [s for s in steps if not isinstance(s, Checkpoint | Save) or s.name != step.name or s.name in taken]
    )
