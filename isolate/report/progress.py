"""What is being done, for whoever waits at a terminal; nothing is shown anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from isolate.terminal import plain

Item = TypeVar("Item")


def watched(results: Iterable[Item], names: Sequence[object]) -> Iterator[Item]:
    """The results as they come, with the name of the one being waited for on the terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.text import Text

    source = iter(results)
    console = Console(stderr=True)
    for number, name in enumerate(names):
        with console.status(Text(plain(f"{name} ({number + 1} of {len(names)})"))):
            item = next(source)
        yield item
