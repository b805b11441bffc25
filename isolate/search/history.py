"""What a slot was given, as plain tokens, so that a saved state can be decoded anew instead.

Only plain histories are known: tokens decoded one after the other, whole slots copied, tails removed, states set back.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from isolate.case import (  # fmt: skip
    Case,
    Checkpoint,
    Clear,
    Decode,
    Load,
    Pattern,
    Reopen,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)

#: A slot's tokens from position 0 on; None where they are not known.
Tokens = list[int] | None


def straight(case: Case, index: int) -> Iterator[list[Step]]:
    """The steps with the restore or load at `index` replaced by a decode of what the state holds, into an emptied slot."""
    step = case.steps[index]
    assert isinstance(step, Restore | Load)
    slots, states = _before(case, index)
    taken, tokens = states[step.name]
    slot = taken if step.slot is UNSET or not isinstance(step.slot, int) else step.slot
    if not tokens:
        return
    decode = Decode(batch=[Run(slot, tokens[-case.context.n_batch :])])
    if len(tokens) > case.context.n_batch:
        return
    others = [other for at, other in enumerate(case.steps) if at != index]
    users = sum(isinstance(other, Restore | Load) and other.name == step.name for other in others)
    before = [
        other
        for other in case.steps[:index]
        if users or not (isinstance(other, Checkpoint | Save) and other.name == step.name)
    ]
    # A server removes what is beyond a checkpoint before it sets it.
    trimmed = before[:-1] if before and isinstance(before[-1], SeqRm) and before[-1].slot == slot else before
    empty: list[Step] = [SeqRm(slot=slot)] if slots.get(slot, []) != [] else []
    yield [*trimmed, *empty, decode, *case.steps[index + 1 :]]
    if trimmed is not before:
        yield [*before, *empty, decode, *case.steps[index + 1 :]]


def _before(case: Case, index: int) -> tuple[dict[int, Tokens], dict[str, tuple[int, Tokens]]]:
    """Slots and states as they are when the step at `index` begins."""
    slots: dict[int, Tokens] = {}
    states: dict[str, tuple[int, Tokens]] = {}
    for step in case.steps[:index]:
        match step:
            case Decode():
                for run in step.batch:
                    slots[run.slot] = _extended(slots.get(run.slot, []), run)
            case Checkpoint() | Save():
                known = slots.get(step.slot, [])
                states[step.name] = step.slot, known if known is None else list(known)
            case Restore() | Load():
                taken, tokens = states[step.name]
                slots[step.slot if isinstance(step.slot, int) else taken] = tokens
            case SeqRm():
                for slot in [step.slot] if step.slot >= 0 else list(slots):
                    slots[slot] = _removed(slots.get(slot, []), step)
            case SeqCp():
                whole = step.p0 <= 0 and step.p1 == -1
                slots[step.into] = slots.get(step.slot, []) if whole else None
            case SeqAdd():
                slots[step.slot] = None
            case SeqKeep():
                slots = {step.slot: slots.get(step.slot, [])}
            case Clear() | Reopen():
                slots.clear()
    return slots, states


def _extended(known: Tokens, run: Run) -> Tokens:
    if known is None or run.tokens == "greedy" or (isinstance(run.at, int) and run.at != len(known)):
        return None
    return known + (run.tokens.tokens() if isinstance(run.tokens, Pattern) else list(run.tokens))


def _removed(known: Tokens, step: SeqRm) -> Tokens:
    if step.p0 <= 0 and step.p1 == -1:
        return []
    return known[: step.p0] if known is not None and step.p1 == -1 else None
