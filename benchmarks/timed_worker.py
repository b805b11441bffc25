"""A worker that writes into the file TIMED how long it ran cases, and how much of that its calls of the library took."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.replay import Timed
from isolate.library.bind import Library
from isolate.replay import protocol, worker

running = 0.0
libraries: list[Timed] = []
original = worker.Worker.run


def timed(*arguments: Any) -> Timed:
    """A library whose calls are timed."""
    libraries.append(Timed(Library(*arguments)))
    return libraries[-1]


def run(self: worker.Worker, request: protocol.RunCase) -> protocol.Ran:
    """Run a case and write down the sums, in seconds: inside the library, and of all."""
    global running
    started = time.perf_counter()
    try:
        return original(self, request)
    finally:
        running += time.perf_counter() - started
        Path(os.environ["TIMED"]).write_text(f"{libraries[0].inside} {running}")


if __name__ == "__main__":
    vars(worker)["Library"] = timed
    worker.Worker.run = run  # type: ignore[method-assign]
    worker.main()
