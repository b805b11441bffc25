"""What clients ask of a server: prompts, when they arrive, how many tokens they want."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from isolate.case import MAX_CONTEXT, Name, Pattern, Token
from isolate.serve.options import ServeError


class Sampled(Struct, frozen=True):
    """A token that is known only when the case is run: number `index` of the answer to request `request`."""

    request: int
    index: int


Symbol = int | Sampled
Count = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]


class Request(Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """A completion, or what `/slots/N?action=...` does with `--slot-save-path`."""

    prompt: Pattern | list[Token] = []
    n_predict: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] = 1
    #: an earlier request whose prompt and answer stand before this prompt, as in a chat
    continues: Count | None = None
    #: arrives when that request has been answered
    after: Count | None = None
    #: or in that round of the server's loop, from 0
    round: Count = 0
    #: -1: the server chooses
    slot: Annotated[int, Meta(ge=-1, le=255)] = -1
    #: saves slot `slot` to the file `name`, restores it from there, or empties it
    action: Literal["complete", "save", "restore", "erase"] = "complete"
    name: Name | None = None

    def pattern(self) -> Pattern | None:
        """Its prompt, where that is a pattern."""
        return self.prompt if isinstance(self.prompt, Pattern) else None


def symbols(requests: Sequence[Request], index: int, answers: Mapping[int, Sequence[int]]) -> list[Symbol]:
    """The whole prompt of a request: what it continues, then its own tokens. Answers that are not known stay symbols."""
    request = requests[index]
    own: list[Symbol] = list(request.prompt.tokens() if isinstance(request.prompt, Pattern) else request.prompt)
    if request.continues is None:
        return own
    earlier = request.continues
    return [*symbols(requests, earlier, answers), *answer(requests, earlier, answers), *own]


def answer(requests: Sequence[Request], index: int, answers: Mapping[int, Sequence[int]]) -> list[Symbol]:
    """The answer to a request, as far as it is known."""
    known = answers.get(index, ())
    return [known[i] if i < len(known) else Sampled(index, i) for i in range(requests[index].n_predict)]


def check(requests: Sequence[Request], slots: int) -> None:
    """ServeError where a request names a slot or another request that is not there."""
    for index, request in enumerate(requests):
        if request.slot >= slots:
            raise ServeError(f"request {index}: slot {request.slot} is outside 0 to {slots - 1}")
        for what, other in (("continues", request.continues), ("after", request.after)):
            if other is not None and other >= index:
                raise ServeError(f"request {index}: `{what}` {other} is not an earlier request")
        if request.action != "complete" and (request.slot < 0 or (request.action != "erase" and request.name is None)):
            raise ServeError(f"request {index}: `{request.action}` needs a `slot` and, but for `erase`, a `name`")
        if request.action == "complete" and request.continues is None and not request.prompt:
            raise ServeError(f"request {index}: its prompt is empty")
