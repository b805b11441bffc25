"""The host's way to a failing call, with file and line where the build has debug information."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from itertools import takewhile
from pathlib import Path

import cpp_demangle

from isolate.trace.record import Failure


def frames_of(failure: Failure) -> list[str]:
    """One line a frame, innermost first: function, library, file and line as far as they are known.

    Ends where Python called the library: what is above is isolate's own.
    """
    split = list(takewhile(lambda frame: not Path(frame[0]).name.startswith("libffi"), map(_split, failure.frames)))
    places: dict[tuple[str, str], str] = {}
    by_library: dict[str, list[str]] = defaultdict(list)
    for library, offset, _ in split:
        by_library[library].append(offset)
    for library, offsets in by_library.items():
        places.update(((library, offset), place) for offset, place in _lines(library, offsets).items())
    return [
        "  ".join(
            part
            for part in (_function(symbol), f"{Path(library).name}+{offset}", places.get((library, offset)))
            if part
        )
        for library, offset, symbol in split
    ]


def _split(frame: str) -> tuple[str, str, str]:
    """`library+0xoffset symbol`, as native/explain.c writes it."""
    place, _, symbol = frame.partition(" ")
    library, _, offset = place.rpartition("+")
    return library, offset, symbol


def _function(symbol: str) -> str:
    try:
        return str(cpp_demangle.demangle(symbol)) if symbol else ""
    except ValueError:
        return symbol


def _lines(library: str, offsets: list[str]) -> dict[str, str]:
    """Offset -> `file:line` by addr2line, where it is installed and the library has debug information."""
    program = shutil.which("addr2line")
    if program is None or not Path(library).is_file():
        return {}
    try:
        done = subprocess.run(
            [program, "-e", library, *offsets], capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    return {offset: line for offset, line in zip(offsets, lines, strict=False) if not line.startswith("??")}
