"""Whether the last batch of a case has room, by the numbers of cells that llama.cpp makes."""

from __future__ import annotations

import pytest

from isolate.case import Case, Checkpoint, Context, Decode, Model, Pattern, Reopen, Restore, Run, SeqAdd, SeqRm, Step
from isolate.search.room import overfull

ONE, TWO = Context(n_ctx=256), Context(n_ctx=512, n_seq_max=2)
SHARED = Context(n_ctx=256, n_seq_max=2, kv_unified=True)


def fed(slot: int, count: int, returns: int = 0) -> Decode:
    return Decode(batch=[Run(slot, Pattern(count, 120))], returns=returns)


@pytest.mark.parametrize(
    ("context", "steps", "over"),
    [
        (ONE, [fed(0, 256)], False),
        (ONE, [fed(0, 257)], True),
        (Context(n_ctx=200), [fed(0, 256)], False),
        (ONE, [fed(0, 200), fed(0, 57)], True),
        (ONE, [fed(0, 200), SeqRm(slot=0, p0=100), fed(0, 57)], False),
        (ONE, [fed(0, 200), SeqRm(slot=0, p0=0, p1=100), SeqAdd(slot=0, delta=-100), fed(0, 57)], False),
        (ONE, [fed(0, 10), Checkpoint(slot=0, name="a"), fed(0, 200), Restore(name="a"), fed(0, 200)], False),
        (ONE, [fed(0, 200), Checkpoint(slot=0, name="a"), SeqRm(slot=0), Restore(name="a"), fed(0, 57)], True),
        (ONE, [fed(0, 200), fed(0, 57, returns=1), fed(0, 56)], False),
        (ONE, [fed(0, 200), Reopen(context=TWO), fed(1, 200)], False),
        (TWO, [fed(0, 200), fed(1, 256)], False),
        (TWO, [fed(0, 257)], True),
        (SHARED, [fed(0, 200), fed(1, 56)], False),
        (SHARED, [fed(0, 200), fed(1, 57)], True),
    ],
)
def test_room_is_counted_as_the_library_counts_it(context: Context, steps: list[Step], over: bool) -> None:
    assert overfull(Case(isolate=1, model=Model(zoo="llama"), context=context, steps=steps)) is over
