"""What parent and child say to each other: one JSON line each way over a socket."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from isolate.case import Case, Check
from isolate.fault import Fault


class RunCase(Struct, tag_field="do", tag="run"):
    """Run a case; `folder` is where a relative model path starts."""

    case: Case
    folder: str
    check: list[Check]
    #: evaluate node by node, recording each
    deep: bool = False


class Describe(Struct, tag_field="do", tag="describe"):
    """Say what the build is and has."""


class MakeModel(Struct, tag_field="do", tag="model"):
    """Make a zoo model and copy it to `out`."""

    zoo: str
    type: str
    seed: int
    out: str
    layers: int | None = None
    experts: int | None = None


class Ready(Struct, tag_field="said", tag="ready"):
    """The build is loaded."""


class Ran(Struct, tag_field="said", tag="ran"):
    """A case came to its end, with the fault that was found or None."""

    fault: Fault | None
    steps: int
    seconds: float
    #: what a check could not judge, and why
    notes: list[str]


class Answer(Struct, tag_field="said", tag="answer"):
    """Plain data."""

    data: dict[str, Any]


class Refused(Struct, tag_field="said", tag="refused"):
    """The case, the model or the build is not usable: the name of an IsolateError class and its sentence."""

    error: str
    message: str


Request = RunCase | Describe | MakeModel
Reply = Ready | Ran | Answer | Refused

_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The message as one line."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """The request in a line."""
    return _requests.decode(line)


def decode_reply(line: bytes) -> Reply:
    """The reply in a line."""
    return _replies.decode(line)
