"""What can be removed from a case: passes for the reducer that know what a step depends on.

Every candidate is checked like a file is: one that is not a valid case is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from isolate.case import (
    Case,
    Checkpoint,
    Context,
    Decode,
    Load,
    Model,
    Reopen,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqRm,
)
from isolate.search import history, numbers
from isolate.search.reduce import Reducer, drop_ranges, halve, keep_needed, lower
from isolate.search.without import (
    CELLS,
    contexts_of,
    counting,
    cut,
    least_cells,
    merged,
    on_one_slot,
    on_slot_zero,
    renumbered,
    runs_of,
    sharing,
    slots,
    unlike_counting,
    valid,
    with_all_runs,
    with_run,
    with_settings,
    with_steps,
    without_slot,
)
from isolate.zoo import ZOO

DEFAULTS = Context()
_MEMORY = ("attention", "window", "recurrent", "hybrid")
STATES = (Checkpoint, Restore, Save, Load)

CaseReducer = Reducer[Case]


def content(case: Case) -> bytes:
    """What of a case decides how it runs."""
    return msgspec.json.encode(replace(case, about="", expect="pass"))


def size(case: Case) -> tuple[int, ...]:
    """Sort key: steps first (a state counts twice), then tokens and slots, then how far settings and model are from plain."""
    runs = [run for step in case.steps if isinstance(step, Decode) for run in step.batch]
    used = slots(case)
    contexts = list(contexts_of(case).values())
    return (
        len(case.steps) + sum(isinstance(step, STATES) for step in case.steps),
        sum(run.count() for run in runs),
        len(used),
        len(runs),
        sum(used),
        sum(context.n_seq_max for context in contexts),
        sum(len(_unlike(context)) for context in contexts)
        + (case.api != "llama_decode")
        + case.hostile
        + len(case.checks()),
        sum(context.n_ctx for context in contexts),
        model_rank(case.model),
        sum(unlike_counting(run) for run in runs),
        numbers.total(case),
        sum(run.at is not UNSET for run in runs) + sum(run.logits != "last" for run in runs),
        len(content(case)),
    )


_COUNTED = ("n_ctx", "n_seq_max")


def _unlike(context: Context) -> list[str]:
    """Settings that are not the default ones, but those that are counted."""
    plain = DEFAULTS.settings()
    return [name for name, value in context.settings().items() if name not in _COUNTED and value != plain.get(name)]


def model_rank(model: Model) -> int:
    """How much a model has: a file most, then by kind of memory and tensors; a quantized one more than F32."""
    if not isinstance(model.zoo, str):
        return 10**6
    recipe = model.recipe()
    plain = model.type is UNSET or model.type == "F32"
    weights = 10 * len(recipe.tensors) + 4 * int(str(recipe.metadata.get("expert_count", 0)))
    return 1000 * _MEMORY.index(recipe.memory) + weights + (not plain) * 2 + (model.seed is not UNSET)


# -- steps


def keep_needed_steps(reducer: CaseReducer) -> None:
    """Leave the steps that are needed, found from the last one on."""
    keep_needed(
        reducer,
        lambda case: len(case.steps),
        lambda case, places: with_steps(case, [case.steps[place] for place in places]),
    )


#: What is kept as it is while all else is made plain.
_KEPT: tuple[frozenset[str], ...] = (frozenset(), frozenset({"tokens"}), frozenset({"slots", "tokens"}))


def plain_at_once(reducer: CaseReducer) -> None:
    """One slot, one token a run, settings and model plain; with the tokens there are; with the slots too."""
    best = reducer.best
    reducer.first(_plain(best, kept) for kept in _KEPT)


def _plain(case: Case | None, kept: frozenset[str]) -> Case | None:
    """The case with everything plain but what is to be kept; None where that is no valid case."""

    def change(run: Run) -> Run:
        return replace(run, at=UNSET, logits="last", tokens=counting(run.count() if "tokens" in kept else 1))

    changes: tuple[tuple[str, Callable[[Case], Case | None]], ...] = (
        ("slots", on_slot_zero),
        ("", lambda case: with_all_runs(case, change)),
        ("settings", _with_plain_settings),
        ("model", _with_plain_model),
    )
    for name, make in changes:
        if case is not None and name not in kept:
            case = make(case)
    return case


def drop_ranges_of_steps(reducer: CaseReducer) -> None:
    """Remove steps, with what depends on them."""
    drop_ranges(
        reducer,
        lambda case: len(case.steps),
        lambda case, start, stop: with_steps(case, [*case.steps[:start], *case.steps[stop:]]),
    )


def drop_slots(reducer: CaseReducer) -> None:
    """Remove everything that is done with a slot; or give all tokens of a batch to one slot."""
    for slot in reversed(slots(reducer.best)):
        reducer.first([without_slot(reducer.best, slot)])
    used = slots(reducer.best)
    if len(used) > 1:
        reducer.first(on_one_slot(reducer.best, slot) for slot in used)
    reducer.first([renumbered(reducer.best)])


def drop_runs(reducer: CaseReducer) -> None:
    """Remove single runs of tokens from batches."""
    for index, number in runs_of(reducer.best, reverse=True):
        reducer.first([with_run(reducer.best, index, number, None)])


def merge_decodes(reducer: CaseReducer) -> None:
    """One batch instead of two that follow each other."""
    index = len(reducer.best.steps) - 2
    while index >= 0:
        reducer.first([merged(reducer.best, index)])
        index = min(index, len(reducer.best.steps) - 1) - 1


def decode_instead_of_restoring(reducer: CaseReducer) -> None:
    """The tokens of a state, decoded anew, instead of the state."""
    index = len(reducer.best.steps) - 1
    while index >= 0:
        if index < len(reducer.best.steps) and isinstance(reducer.best.steps[index], Restore | Load):
            reducer.first(with_steps(reducer.best, steps) for steps in history.straight(reducer.best, index))
        index -= 1


def share_states(reducer: CaseReducer) -> None:
    """One state that is set twice instead of two."""
    for index in range(len(reducer.best.steps) - 1, -1, -1):
        step = reducer.best.steps[index] if index < len(reducer.best.steps) else None
        if isinstance(step, Restore | Load):
            maker = Checkpoint if isinstance(step, Restore) else Save
            names = [other.name for other in reducer.best.steps[:index] if isinstance(other, maker)]
            reducer.first(sharing(reducer.best, index, name) for name in names if name != step.name)


def shorten_runs(reducer: CaseReducer) -> None:
    """Fewer tokens, by halves: in all runs at once, then in each."""
    reducer.first([with_all_runs(reducer.best, lambda run: cut(run, 1))])
    for index, number in runs_of(reducer.best):
        run = _run(reducer.best, index, number)
        # what a last ubatch holds alone
        last = run.count() % reducer.best.context.n_ubatch
        if last and last < run.count():
            reducer.first([with_run(reducer.best, index, number, cut(run, last))])
        _with_counts(reducer, index, number, halve)


def fewest_tokens(reducer: CaseReducer) -> None:
    """As few tokens as will do in each run."""
    for index, number in runs_of(reducer.best):
        _with_counts(reducer, index, number, lower)


def _with_counts(reducer: CaseReducer, index: int, number: int, bring_down: Callable[..., int]) -> None:
    run = _run(reducer.best, index, number)
    bring_down(reducer, run.count(), 1, lambda count: with_run(reducer.best, index, number, cut(run, count)))


def _run(case: Case, index: int, number: int) -> Run:
    step = case.steps[index]
    assert isinstance(step, Decode)
    return step.batch[number]


def plain_runs(reducer: CaseReducer) -> None:
    """Positions that follow each other, logits of the last token, tokens 0, 1, 2, ..."""
    changes: list[Callable[[Run], Run]] = [
        lambda run: replace(run, at=UNSET),
        lambda run: replace(run, logits="last"),
        lambda run: replace(run, tokens=counting(run.count())),
    ]
    for change in changes:
        if reducer.first([with_all_runs(reducer.best, change)]) is None:
            for index, number in runs_of(reducer.best):
                run = reducer.best.steps[index].batch[number]  # type: ignore[union-attr]
                reducer.first([with_run(reducer.best, index, number, change(run))])


def plain_numbers(reducer: CaseReducer) -> None:
    """Whole slots instead of ranges of positions, shifts by one, states in memory."""
    for index in range(len(reducer.best.steps)):
        changes: list[dict[str, Any]] = []
        step = reducer.best.steps[index]
        if isinstance(step, SeqRm | SeqCp | SeqAdd):
            changes += [{"p0": -1, "p1": -1}, {"p0": -1}, {"p1": -1}]
        if isinstance(step, SeqAdd):
            changes.append({"delta": 1})
        if isinstance(step, Save):
            changes.append({"via": "memory"})
        for change in changes:
            steps = list(reducer.best.steps)
            steps[index] = replace(steps[index], **change)
            reducer.first([with_steps(reducer.best, steps)])


# -- settings and model


def plain_settings(reducer: CaseReducer) -> None:
    """Settings of each context to their defaults: all at once, then each; then as few slots and cells as will do.

    Cells are counted in units of what the library rounds n_ctx up to.
    """
    reducer.first([_with_plain_settings(reducer.best)])
    for change in ({"api": "llama_decode"}, {"hostile": False}):
        reducer.first([valid(replace(reducer.best, **change))])
    wanted = reducer.best.checks()
    reducer.first(valid(replace(reducer.best, check=[other for other in wanted if other != name])) for name in wanted)
    for place in contexts_of(reducer.best):
        _plain_context(reducer, place)


def _plain_context(reducer: CaseReducer, place: int) -> None:
    context = contexts_of(reducer.best)[place]
    changes = {name: getattr(DEFAULTS, name) for name in _unlike(context)}
    if len(changes) > 1:
        reducer.first([with_settings(reducer.best, changes, place)])
    for name in _unlike(contexts_of(reducer.best)[place]):
        reducer.first([with_settings(reducer.best, {name: changes[name]}, place)])
    lower(
        reducer,
        context.n_seq_max,
        max(slots(reducer.best), default=0) + 1,
        lambda count: with_settings(reducer.best, {"n_seq_max": count}, place),
    )
    lower(
        reducer,
        -(-contexts_of(reducer.best)[place].n_ctx // CELLS),
        least_cells(reducer.best) // CELLS,
        lambda count: with_settings(reducer.best, {"n_ctx": count * CELLS}, place),
    )


def _with_plain_settings(case: Case) -> Case | None:
    plain = replace(DEFAULTS, n_ctx=least_cells(case), n_seq_max=max(slots(case), default=0) + 1)
    steps = [replace(step, context=plain) if isinstance(step, Reopen) else step for step in case.steps]
    return valid(replace(case, context=plain, steps=steps, api="llama_decode", hostile=False))


#: The plainest there is.
_PLAIN = Model(zoo=min(ZOO, key=lambda name: model_rank(Model(zoo=name))), layers=1)


def _with_plain_model(case: Case) -> Case | None:
    return _with_model(case, _PLAIN)


def plain_model(reducer: CaseReducer) -> None:
    """The plainest model of the zoo; or the same one, not quantized, of the default seed; of one layer and expert."""
    kept = reducer.best.model
    reducer.first([_with_plain_model(reducer.best)])
    if kept.zoo is not UNSET:
        reducer.first([_with_model(reducer.best, Model(zoo=kept.zoo))])
        reducer.first(_with_model(reducer.best, model) for model in islice(_smaller(reducer.best.model), 1))


def plainest_model(reducer: CaseReducer) -> None:
    """The plainest model of the zoo that will do, of the same type and seed; then without them; then of one layer and expert."""
    kept = reducer.best.model
    names = sorted(ZOO, key=lambda name: model_rank(Model(zoo=name)))
    reducer.first(_with_model(reducer.best, Model(zoo=name, type=kept.type, seed=kept.seed)) for name in names)
    kept = reducer.best.model
    if kept.zoo is not UNSET:
        plainer = ({"type": UNSET, "seed": UNSET}, {"type": UNSET}, {"seed": UNSET})
        reducer.first(_with_model(reducer.best, replace(kept, **change)) for change in plainer)
        reducer.first(_with_model(reducer.best, model) for model in _smaller(reducer.best.model))


def _smaller(model: Model) -> Iterator[Model]:
    """The model with one layer and one expert, or one of either, as far as it lets that."""
    recipe = ZOO[str(model.zoo)]
    layers: dict[str, Any] = {"layers": 1} if recipe.alike else {}
    experts: dict[str, Any] = {"experts": 1} if "expert_count" in recipe.metadata else {}
    for change in ({**layers, **experts}, layers, experts):
        if change:
            yield replace(model, **change)


def _with_model(case: Case, model: Model) -> Case | None:
    return valid(replace(case, model=model))


#: In the order that takes away most with least; what asks most comes last, when nothing after it changes what it was asked of.
PASSES: tuple[Callable[[CaseReducer], None], ...] = (
    keep_needed_steps,
    plain_at_once,
    drop_slots,
    shorten_runs,
    plain_settings,
    plain_model,
    decode_instead_of_restoring,
    share_states,
    merge_decodes,
    drop_runs,
    plain_runs,
    plain_numbers,
    numbers.small_numbers,
    numbers.last_tokens,
    drop_ranges_of_steps,
    fewest_tokens,
    plainest_model,
)
