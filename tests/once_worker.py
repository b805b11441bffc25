"""A worker that aborts in one run only, at the first step of all; ONCE is a file that is there afterwards."""

from __future__ import annotations

import os
from pathlib import Path

from isolate.case import Step
from isolate.replay import engine, worker

original = engine.Engine._do


def once(self: engine.Engine, index: int, step: Step) -> engine.Result:
    if not Path(os.environ["ONCE"]).exists():
        Path(os.environ["ONCE"]).touch()
        os.abort()
    return original(self, index, step)


engine.Engine._do = once  # type: ignore[method-assign]
worker.main()
