"""The slots as plain token lists, by the rules of each kind of memory."""

from __future__ import annotations

import numpy as np
import pytest

from isolate.case import (
    UNSET,
    Checkpoint,
    Clear,
    Context,
    Damage,
    Decode,
    Load,
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
from isolate.replay.batch import Fed
from isolate.replay.engine import Result
from isolate.replay.reference import END, Decoded, Kind, Moved, Reference, Removed, Slot

KINDS: list[Kind] = ["attention", "window", "recurrent", "hybrid"]


class Slots:
    """A reference that is told steps as an engine would tell them."""

    def __init__(self, kind: Kind, reach: int = 0, relative: bool = True) -> None:
        self.reference = Reference(kind, reach, relative)
        self.places: dict[str, int] = {}

    def decode(self, slot: int, tokens: list[int], code: int = 0, at: int | None = None) -> None:
        positions = self.reference.slot(slot).positions
        start = (max(positions) + 1 if positions else 0) if at is None else at
        step = Decode(batch=[Run(slot, tokens)])  # type: ignore[arg-type]
        self.reference.after(step, Result(code, fed=[Fed(slot, np.array(tokens, np.int32), start)]))

    def do(self, *steps: Step, code: int = 1) -> None:
        for step in steps:
            slot = None
            if isinstance(step, Checkpoint | Save):
                slot = self.places[step.name] = step.slot
            elif isinstance(step, Restore | Load):
                slot = self.places[step.name] if step.slot is UNSET else step.slot  # type: ignore[assignment]
            self.reference.after(step, Result(code, slot=slot))

    def __getitem__(self, number: int) -> Slot:
        return self.reference.slot(number)

    def expects(self, number: int, low: int, high: int) -> bool:
        """Those positions are what a right library has."""
        return (held := self.reference.held(number)) is None or held.allows(low, high)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_slot_is_plain(kind: Kind) -> None:
    slots = Slots(kind, reach=8)
    slots.decode(0, [5, 6])
    slots.decode(0, [7])
    assert slots[0].tokens == (5, 6, 7)
    assert slots[0].positions == (0, 1, 2)
    assert slots[0].acts() == (Decoded((5, 6, 7), (0, 1, 2)),)
    assert slots[0].doubt == ""
    assert slots[1] == Slot()


def test_a_slot_may_begin_anywhere() -> None:
    slots = Slots("attention")
    slots.decode(0, [5, 6], at=10)
    assert slots[0].acts() == (Decoded((5, 6), (10, 11)),)
    assert slots.expects(0, 10, 11)


@pytest.mark.parametrize(
    ("kind", "low"), [("attention", 0), ("recurrent", 9), ("hybrid", 9)], ids=["attention", "recurrent", "hybrid"]
)
def test_positions_of_ten_tokens(kind: Kind, low: int) -> None:
    slots = Slots(kind)
    assert slots.expects(0, -1, -1)
    slots.decode(0, list(range(10)))
    assert slots.expects(0, low, 9)
    assert not slots.expects(0, low, 8)
    assert not slots.expects(0, 9 - low, 9)
    assert str(slots.reference.held(0)) == f"{low} and 9"


def test_a_window_promises_what_it_reaches_and_may_keep_more() -> None:
    slots = Slots("window", reach=4)
    slots.decode(0, list(range(10)))
    # positions 9 - 4 + 2 and newer must be there
    assert [low for low in range(10) if slots.expects(0, low, 9)] == list(range(8))
    assert not slots.expects(0, 0, 8)
    assert not slots.expects(0, -1, -1)


def test_a_removed_tail_leaves_a_plain_slot() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3, 4])
    slots.do(SeqRm(slot=0, p0=2))
    assert slots[0].acts() == (Decoded((1, 2), (0, 1)),)
    assert slots.expects(0, 0, 1)


def test_a_hole_makes_a_history() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3, 4])
    slots.do(SeqRm(slot=0, p0=1, p1=2), SeqAdd(slot=0, p0=2, delta=-1))
    slots.decode(0, [5])
    slots.decode(0, [6])
    assert (slots[0].tokens, slots[0].positions) == ((1, 3, 4, 5, 6), (0, 1, 2, 3, 4))
    first = Decoded((1, 2, 3, 4), (0, 1, 2, 3))
    assert slots[0].acts() == (first, Removed(1, 2), Moved(2, END, -1), Decoded((5, 6), (3, 4)))
    slots.do(SeqRm(slot=0))
    assert slots[0] == Slot()


def test_a_whole_slot_moved_stays_plain_where_only_distances_count() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2])
    slots.do(SeqAdd(slot=0, delta=7))
    assert slots[0].acts() == (Decoded((1, 2), (7, 8)),)
    assert slots[0].moved
    assert slots.expects(0, 7, 8)
    absolute = Slots("attention", relative=False)
    absolute.decode(0, [1, 2])
    absolute.do(SeqAdd(slot=0, delta=7))
    assert absolute[0].acts() == (Decoded((1, 2), (0, 1)), Moved(0, END, 7))


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_what_the_library_refused_was_not_done(kind: Kind) -> None:
    slots = Slots(kind)
    slots.decode(0, [1, 2, 3])
    slots.do(SeqRm(slot=0, p0=2), code=0)
    assert slots[0].tokens == (1, 2, 3)
    assert slots.expects(0, 2, 2)


def test_recurrent_state_goes_back_where_the_library_agreed() -> None:
    slots = Slots("hybrid")
    slots.decode(0, [1, 2, 3, 4])
    slots.do(SeqRm(slot=0, p0=3))
    assert slots[0].recurrent.tokens == slots[0].tokens == (1, 2, 3)
    assert slots.expects(0, 2, 2)


def test_a_hole_in_a_recurrent_slot_changes_nothing() -> None:
    slots = Slots("recurrent")
    slots.decode(0, [1, 2, 3, 4])
    slots.do(SeqRm(slot=0, p0=1, p1=2))
    assert slots[0].acts() == (Decoded((1, 2, 3, 4), (0, 1, 2, 3)),)


@pytest.mark.parametrize("order", ["remove first", "restore first"])
@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_a_checkpoint_takes_back_the_half_that_cannot_go_back(kind: Kind, order: str) -> None:
    slots = Slots(kind, reach=4)
    slots.decode(0, [1, 2, 3, 4, 5])
    slots.do(Checkpoint(slot=0, name="prompt"))
    slots.decode(0, [6, 7, 8])
    steps: list[Step] = [SeqRm(slot=0, p0=5), Restore(name="prompt")]
    slots.do(*(steps if order == "remove first" else reversed(steps)))
    slots.decode(0, [9])
    assert slots[0].doubt == ""
    assert slots[0].acts() == (Decoded((1, 2, 3, 4, 5, 9), (0, 1, 2, 3, 4, 5)),)


def test_halves_that_disagree_have_no_right_logits() -> None:
    slots = Slots("hybrid")
    slots.decode(0, [1, 2, 3])
    slots.do(Checkpoint(slot=0, name="prompt"))
    slots.decode(0, [4, 5])
    slots.do(Restore(name="prompt"))
    # as llama.cpp joins the two: the recurrent half stands at 2, attention goes to 4
    assert slots.expects(0, 2, 2)
    slots.decode(0, [6], at=3)
    assert "positions that were decoded again" in slots[0].doubt
    other = Slots("hybrid")
    other.decode(0, [1, 2, 3])
    other.do(Checkpoint(slot=0, name="prompt"), SeqRm(slot=0), Restore(name="prompt"))
    other.decode(0, [6], at=3)
    assert "its recurrent state has seen other tokens" in other[0].doubt


def test_a_saved_slot_is_the_slot_as_it_was() -> None:
    slots = Slots("hybrid")
    slots.decode(0, [1, 2, 3])
    slots.do(Save(slot=0, name="whole"))
    slots.decode(0, [4])
    slots.do(Load(name="whole", slot=1))
    assert slots[1].tokens == slots[1].recurrent.tokens == (1, 2, 3)
    assert slots[0].tokens == (1, 2, 3, 4)


def test_a_part_of_plain_attention_is_all_of_it() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3])
    slots.do(Checkpoint(slot=0, name="prompt"), SeqRm(slot=0), Restore(name="prompt"))
    assert slots[0].tokens == (1, 2, 3)


def test_a_history_is_saved_too() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3])
    slots.do(SeqRm(slot=0, p0=0, p1=1), Save(slot=0, name="whole"), Load(name="whole", slot=1))
    assert slots[1].acts() == (Decoded((1, 2, 3), (0, 1, 2)), Removed(0, 1))


def test_a_refused_or_damaged_state_leaves_a_slot_unknown_until_it_is_emptied() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3])
    slots.do(Save(slot=0, name="whole"))
    slots.do(Load(name="whole"), code=0)
    assert slots[0].doubt == "a state was refused"
    assert slots.expects(0, 17, 99)
    slots.do(SeqRm(slot=0))
    assert slots.expects(0, -1, -1)
    slots.do(Load(name="whole", damage=Damage(cut=8)))
    assert slots[0].doubt == "its state was changed on purpose"


def test_a_window_that_lost_what_the_next_token_reaches() -> None:
    slots = Slots("window", reach=4)
    slots.decode(0, list(range(10)))
    slots.do(SeqRm(slot=0, p0=6))
    slots.reference.observe(0, 2)
    slots.decode(0, [6])
    assert slots[0].doubt == ""
    slots.do(SeqRm(slot=0, p0=3))
    slots.reference.observe(0, 2)
    slots.decode(0, [3])
    assert slots[0].doubt == "its window no longer holds all that the next token reaches"


def test_copies_are_slots_of_their_own() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3])
    slots.do(SeqCp(slot=0, into=1), SeqCp(slot=0, into=2, p1=2), SeqCp(slot=0, into=0))
    slots.decode(1, [4])
    assert (slots[0].tokens, slots[1].tokens, slots[2].tokens) == ((1, 2, 3), (1, 2, 3, 4), (1, 2))
    assert slots[2].history is None
    slots.do(SeqCp(slot=0, into=1))
    assert "not empty" in slots[1].doubt


def test_a_part_of_a_hybrid_slot_is_a_part_of_both_halves() -> None:
    slots = Slots("hybrid")
    slots.decode(0, list(range(20)))
    slots.do(SeqCp(slot=0, into=1, p1=10))
    assert slots.expects(1, 9, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_empties_slots(kind: Kind) -> None:
    def filled() -> Slots:
        slots = Slots(kind, reach=8)
        for slot in range(3):
            slots.decode(slot, [slot, 1])
        return slots

    slots = filled()
    slots.do(SeqKeep(slot=1))
    assert [bool(slots[number].tokens) for number in range(3)] == [False, True, False]
    for step in (Clear(), Reopen(context=Context()), SeqRm(slot=-1)):
        slots = filled()
        slots.do(step)
        assert [slots[number] for number in range(3)] == [Slot()] * 3


def test_a_decode_that_failed() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2])
    slots.decode(0, [3], code=1)
    slots.decode(0, [3], code=-1)
    assert slots[0].tokens == (1, 2)
    slots.decode(0, [3], code=-3)
    assert slots[0].doubt == "a decode failed in the middle"
    assert slots.expects(0, 5, 5)


def test_cells_moved_onto_each_other_or_below_zero() -> None:
    slots = Slots("attention")
    slots.decode(0, [1, 2, 3])
    slots.do(SeqAdd(slot=0, p0=2, delta=-1))
    assert slots[0].doubt == "two of its cells were moved to one position"
    slots.do(SeqRm(slot=0))
    slots.decode(0, [1, 2, 3])
    slots.do(SeqAdd(slot=0, delta=-1))
    assert slots[0].unknown
