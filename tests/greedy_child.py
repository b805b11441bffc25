"""A child that replays a case and prints, for each token a server sampled and fed back, that token and the replay's own.

python -m tests.greedy_child BUILD CASE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from isolate import case as cases
from isolate.case import Decode
from isolate.library.bind import Library
from isolate.library.find import find_build
from isolate.replay.engine import Engine
from isolate.replay.loaded import Models
from isolate.trace.ring import Ring, Writer


def main() -> None:
    """Replay and print a JSON list of [slot, recorded token, replayed token]."""
    writer = Writer(f"/proc/self/fd/{Ring.create_anonymous()}")
    library = Library(find_build(sys.argv[1]))
    library.llama_backend_init()
    path = Path(sys.argv[2])
    case = cases.read(path)
    models = Models(library, writer, 0)
    models.load(Path(str(case.model.file)))
    engine = Engine(library, writer, models, case)
    engine.open()
    pairs = []
    best: dict[int, int] = {}
    for _, step, result in engine.steps():
        if isinstance(step, Decode):
            for run, fed in zip(step.batch, result.fed, strict=True):
                # A token that is fed alone after logits were asked for is the one that was sampled from them.
                if run.slot in best and len(fed.tokens) == 1 and run.outputs() == [0]:
                    pairs.append([run.slot, int(fed.tokens[0]), best[run.slot]])
                best.pop(run.slot, None)
            best.update({row.slot: int(engine.logits(row).argmax()) for row in result.rows})
    sys.stdout.write(json.dumps(pairs))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
