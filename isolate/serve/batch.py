"""A batch as the server fills it, token by token, and the runs of a case's `decode` step that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from msgspec import UNSET

from isolate.case import Pattern, Run
from isolate.serve.cache import Prompt
from isolate.serve.options import ServeError
from isolate.serve.requests import Request, Symbol


@dataclass
class Item:
    """One token of a batch."""

    slot: int
    position: int
    symbol: Symbol
    output: bool
    #: place in the prompt of the slot's request, where that is a pattern
    index: int | None = None


class Holder(Protocol):
    """What `runs` needs of a slot."""

    prompt: Prompt
    task: Any


def runs(items: Sequence[Item], slots: Sequence[Holder], requests: Sequence[Request]) -> list[Run]:
    """The tokens slot by slot, in the order of the batch; a pattern stays one. ServeError for a token nobody knows."""
    found = []
    for number, group in groupby(items, key=lambda item: item.slot):
        part = list(group)
        slot = slots[number]
        found.append(
            Run(
                number,
                _tokens(part, requests[slot.task.index]),
                "last" if part[-1].output else "none",
                part[0].position if slot.prompt.moved else UNSET,
            )
        )
    return found


def _tokens(part: list[Item], request: Request) -> Any:
    first = part[0]
    if first.index is not None and isinstance(request.prompt, Pattern):
        pattern = request.prompt
        start = (pattern.first + pattern.stride * first.index) % pattern.modulo
        return Pattern(len(part), pattern.modulo, start, pattern.stride)
    known = [item.symbol for item in part if isinstance(item.symbol, int)]
    if len(known) == len(part):
        return known
    if len(part) == 1 and first.output and first.index is None:
        return "greedy"
    raise ServeError(
        f"request {request.continues} is continued before its answer is known: run it first and give its `answers`"
    )
