"""A worker that aborts in three of five runs of a case that decodes at least 3 tokens at once; FLAKY is a file to count in."""

from __future__ import annotations

import os
from pathlib import Path

from isolate.case import Step
from isolate.replay import engine, worker

original = engine.Engine._do


def flaky(self: engine.Engine, index: int, step: Step) -> engine.Result:
    if sum(step.tokens_by_slot().values()) >= 3:
        with Path(os.environ["FLAKY"]).open("ab") as file:
            number = file.tell()
            file.write(b".")
        if number % 5 in (0, 2, 3):
            os.abort()
    return original(self, index, step)


engine.Engine._do = flaky  # type: ignore[method-assign]
worker.main()
