"""The kernels of a PTX text: their directives, parameters and shared variables (PTX ISA 9.0, chapters 5 and 11).

Only what a launch depends on is read; the instructions between are skipped by searching.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isolate.errors import BuildError
from isolate.trace.bounds import Bounds, Dimensions

_NAME = re.compile(rb"\s*(?:\([^)]*\)\s*)?([\w$.]+)\s*")
_PARAMETER = re.compile(
    rb"\.param\s+(?:\.align\s+\d+\s+)?\.\w*?(\d+)(?:\s+\.ptr[^,)]*?)?\s+[\w$]+(?:\[(\d+)\])?\s*(?:,|$)"
)
_DIRECTIVE = re.compile(rb"\.(maxntid|reqntid|minnctapersm|maxnreg|reqnctapercluster|maxclusterrank)\s+([\d, \t]+)")
#: not of the extern kind, whose size is the launch's dynamic shared memory
_SHARED = re.compile(
    rb"^[ \t]*(\.extern[ \t]+)?(?:\.\w+[ \t]+)?\.shared[ \t]+(?:\.align[ \t]+(\d+)[ \t]+)?\.\w*?(\d+)[ \t]+([\w$]+)((?:\[\d*\])*)",
    re.M,
)
_WORD = re.compile(rb"[\w$]+")


@dataclass
class _Function:
    name: bytes
    entry: bool
    parameters: bytes
    directives: bytes
    #: where its body is in the text; empty for a declaration
    body: slice


@dataclass(frozen=True)
class _Variable:
    size: int
    align: int


def target(text: bytes) -> str:
    """What `.target` says: sm_80, sm_90a, ..."""
    match = re.search(rb"^\.target[ \t]+([\w]+)", text, re.M)
    return match[1].decode() if match else ""


def kernels(text: bytes, what: str) -> list[Bounds]:
    """The kernels of a PTX text, in its order. BuildError where one has no end."""
    functions = list(_functions(text, what))
    bodies = [function for function in functions if function.body.stop > function.body.start]
    own: dict[bytes, dict[bytes, _Variable]] = {function.name: {} for function in bodies}
    common: dict[bytes, _Variable] = {}
    place = iter(bodies)
    current = next(place, None)
    for position, name, variable in _shared(text):
        while current is not None and position >= current.body.stop:
            current = next(place, None)
        inside = current is not None and position >= current.body.start
        (own[current.name] if current is not None and inside else common)[name] = variable

    # A variable that several functions use stands outside of them: whoever mentions it, or calls one that does, pays.
    called = {function.name for function in bodies if not function.entry}
    if common or any(own[name] for name in called):
        words = {
            function.name: set(_WORD.findall(text, function.body.start, function.body.stop)) for function in bodies
        }
        for function in bodies:
            if function.entry:
                own[function.name] = _reached(function.name, words, own, common, called)
    return [_bounds(function, own[function.name].values()) for function in bodies if function.entry]


def _functions(text: bytes, what: str) -> Iterator[_Function]:
    begins = sorted([*_found(text, b".entry "), *_found(text, b".func ")])
    position = 0
    for start in begins:
        if start < position:
            continue
        name = _NAME.match(text, text.find(b" ", start))
        ends = [place for place in (text.find(b"{", start), text.find(b";", start)) if place >= 0]
        if name is None or not ends:
            raise BuildError(f"{what} is damaged: a PTX function at {start} of its text has no body")
        opening = min(ends)
        head = text[name.end() : opening]
        parameters, _, directives = head.partition(b")") if head.startswith(b"(") else (b"", b"", head)
        if text[opening : opening + 1] == b"{":
            closing = text.find(b"\n}", opening)
            if closing < 0:
                raise BuildError(f"{what} is damaged: the PTX function {name[1].decode(errors='replace')} has no end")
        else:
            closing = opening
        yield _Function(name[1], text.startswith(b".entry", start), parameters[1:], directives, slice(opening, closing))
        position = closing


def _found(text: bytes, word: bytes) -> Iterator[int]:
    """Where a word is. A regular expression would stop at every point of the text."""
    position = text.find(word)
    while position >= 0:
        yield position
        position = text.find(word, position + len(word))


def _shared(text: bytes) -> Iterator[tuple[int, bytes, _Variable]]:
    for position in _found(text, b".shared ."):
        match = _SHARED.match(text, text.rfind(b"\n", 0, position) + 1)
        if match is not None and match[1] is None:
            size = int(match[3]) // 8
            for count in re.findall(rb"\d+", match[5]):
                size *= int(count)
            yield position, match[4], _Variable(size, int(match[2] or b"1"))


def _reached(
    name: bytes,
    words: dict[bytes, set[bytes]],
    own: dict[bytes, dict[bytes, _Variable]],
    common: dict[bytes, _Variable],
    called: set[bytes],
) -> dict[bytes, _Variable]:
    found: dict[bytes, _Variable] = {}
    seen = {name}
    waiting = [name]
    while waiting:
        function = waiting.pop()
        found.update(own[function])
        found.update((variable, common[variable]) for variable in words[function] & common.keys())
        more = (words[function] & called) - seen
        seen |= more
        waiting += more
    return found


def _bounds(function: _Function, variables: Iterable[_Variable]) -> Bounds:
    directives = {
        match[1]: [int(n) for n in re.findall(rb"\d+", match[2])] for match in _DIRECTIVE.finditer(function.directives)
    }
    shared = 0
    for variable in variables:
        shared = -(-shared // variable.align) * variable.align + variable.size
    parameters = tuple(int(bits) // 8 * int(count or b"1") for bits, count in _PARAMETER.findall(function.parameters))
    return Bounds(
        name=function.name.decode(errors="replace"),
        max_threads=_dimensions(directives.get(b"maxntid")),
        required_threads=_dimensions(directives.get(b"reqntid")),
        min_blocks=_first(directives.get(b"minnctapersm")),
        max_registers=_first(directives.get(b"maxnreg")),
        static_shared=shared,
        parameters=parameters,
        cluster=_dimensions(directives.get(b"reqnctapercluster")),
        max_cluster=_first(directives.get(b"maxclusterrank")),
    )


def _dimensions(numbers: list[int] | None) -> Dimensions | None:
    if not numbers:
        return None
    x, y, z = [*numbers, 1, 1][:3]
    return (x, y, z)


def _first(numbers: list[int] | None) -> int | None:
    return numbers[0] if numbers else None
