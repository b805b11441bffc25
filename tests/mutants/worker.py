"""A worker on a library with one planted fault: MUTANT is its name."""

from __future__ import annotations

import os

from isolate.replay import worker
from tests.mutants.catalogue import MUTANTS
from tests.mutants.layer import Faulty

WORKER = "tests.mutants.worker"

if __name__ == "__main__":
    worker.Library = MUTANTS.get(os.environ["MUTANT"], Faulty)  # type: ignore[misc, assignment]
    worker.main()
