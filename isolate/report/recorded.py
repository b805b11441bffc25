"""What came of a recording, for a person at a terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from isolate.report.text import headline
from isolate.serve.record import Made


def text(made: Made, out: Path, replay: str) -> Iterator[str]:
    """A line on what was written, how the program ended, each note, the fault, and how to replay it."""
    steps = len(made.case.steps)
    last = made.case.steps[-1].kind
    unfinished = f"; the last, `{last}`, did not come back" if made.unfinished else ""
    yield f"recorded {out}  {steps} step{'s' if steps != 1 else ''}{unfinished}"
    if made.status > 128:
        yield f"  the program died of {_name(made.status - 128)}"
    elif made.status:
        yield f"  the program ended with {made.status}"
    for note in made.notes:
        yield f"  note: {note}"
    if made.fault:
        yield f"  {headline(made.fault)}"
    yield f"  replay {replay}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
