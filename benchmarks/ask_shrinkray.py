"""shrinkray, asking a predicate over its standard files: run by `benchmarks.minimize` in a Python that has it.

The first line of its input is what to shrink, in base64. Each line it prints is a candidate, answered by `1`, `0`, or the end.
"""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from random import Random

import trio
from shrinkray.problem import BasicReductionProblem
from shrinkray.reducer import ShrinkRay
from shrinkray.work import Volume, WorkContext


async def interesting(data: bytes) -> bool:
    """What the parent says of a candidate."""
    print(b64encode(data).decode(), flush=True)
    answer = sys.stdin.readline()
    if not answer:
        sys.exit(0)
    return answer == "1\n"


async def main() -> None:
    """Shrink until nothing more is found, or nobody answers any more."""
    work = WorkContext(random=Random(0), parallelism=1, volume=Volume.quiet)
    await ShrinkRay(target=BasicReductionProblem(b64decode(sys.stdin.readline()), interesting, work)).run()


if __name__ == "__main__":
    trio.run(main)
