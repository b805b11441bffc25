"""What a program needs to see an oracle's fault again without the oracle: plain numbers in the fault's evidence, under `again`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from isolate.errors import IsolateError
from isolate.fault import Fault
from isolate.steps import Int32, Token

#: Tokens of a slot that are written down; a fault after more is to be minimized first.
MOST_TOKENS = 1 << 14


class Held(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the oldest and the newest position of a slot can be: first and last of each."""

    slot: Int32
    oldest: tuple[Int32, Int32]
    newest: tuple[Int32, Int32]
    #: or it may hold nothing
    or_none: bool = False


class Decoded(Struct, frozen=True, forbid_unknown_fields=True, tag="decoded"):
    """Tokens were decoded from `start` on."""

    start: Int32
    tokens: list[Token]


class Removed(Struct, frozen=True, forbid_unknown_fields=True, tag="removed"):
    """Positions p0 to p1 (not included) were removed."""

    p0: Int32
    p1: Int32


class Moved(Struct, frozen=True, forbid_unknown_fields=True, tag="moved"):
    """Positions p0 to p1 (not included) moved by delta."""

    p0: Int32
    p1: Int32
    delta: Int32


Act = Decoded | Removed | Moved
Kind = TypeVar("Kind")


class Alone(Struct, frozen=True, forbid_unknown_fields=True):
    """What a slot went through, to be gone through in a context with one slot of `cells` positions: the row that differs."""

    slot: Int32
    position: Int32
    #: the largest distance (NMSE) that counts as rounding
    limit: Annotated[float, Meta(ge=0)]
    cells: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    #: the last one is a decode that holds the position; None where they are too many to be written down
    acts: list[Act] | None


def written(again: Held | Alone) -> dict[str, Any]:
    """It as an entry of a fault's evidence."""
    if isinstance(again, Alone) and again.acts is not None:
        tokens = sum(len(act.tokens) for act in again.acts if isinstance(act, Decoded))
        again = again if tokens <= MOST_TOKENS else msgspec.structs.replace(again, acts=None)
    data: dict[str, Any] = msgspec.to_builtins(again)
    return data


def held(fault: Fault) -> Held:
    """What a fault of kind `positions` has. IsolateError where it was not written down."""
    return _read(fault, Held)


def alone(fault: Fault) -> Alone:
    """What a fault of kind `logits` has. IsolateError where it was not written down."""
    found = _read(fault, Alone)
    if found.acts is None:
        raise IsolateError(f"the slot went through more than {MOST_TOKENS} tokens: minimize the case first")
    if not found.acts or not isinstance(found.acts[-1], Decoded) or not found.acts[-1].tokens:
        raise IsolateError("`again` in the fault's evidence does not end with tokens that were decoded")
    last = found.acts[-1]
    if not 0 <= found.position - last.start < len(last.tokens):
        raise IsolateError(f"`again` in the fault's evidence does not decode position {found.position} last")
    return found


def _read(fault: Fault, kind: type[Kind]) -> Kind:
    if "again" not in fault.evidence:
        raise IsolateError("the finding does not hold what was expected instead: run its case again with this isolate")
    try:
        return msgspec.convert(fault.evidence["again"], kind)
    except msgspec.ValidationError as error:
        raise IsolateError(f"`again` in the fault's evidence: {error}") from None
