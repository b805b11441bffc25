"""A table of runs: each cell is a case on a target, run in a child of its own, several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from isolate.errors import IsolateError
from isolate.replay.target import find
from isolate.search.pin import Job, Result, Settings, pin_all


@dataclass(frozen=True)
class Cell:
    """One run of the table: a result, or the sentence that says why it was not run."""

    row: str
    column: str
    result: Result | str


def on_gpus(jobs: Sequence[tuple[str, Job]], gpus: Sequence[str], settings: Settings, at_once: int) -> Iterator[Cell]:
    """Each named job on each simulated GPU, row by row; DeviceError when the build has no dry device."""
    targets = {gpu: find(f"dry:{gpu}", settings.build, settings.include) for gpu in gpus}

    def cell(row: str, job: Job, gpu: str) -> Cell:
        here = replace(job, replay=f"{job.replay} --target dry:{gpu}")
        try:
            (result,) = pin_all([here], replace(settings, target=targets[gpu]))
        except IsolateError as error:
            return Cell(row, gpu, error.message)
        return Cell(row, gpu, result if isinstance(result, Result) else result.message)

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda each: cell(*each), [(row, job, gpu) for row, job in jobs for gpu in gpus])
