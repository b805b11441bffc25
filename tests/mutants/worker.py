"""A worker on a library with one planted fault: MUTANT is its name, empty for none."""

from __future__ import annotations

import os

from isolate.replay import worker
from isolate.replay.target import Target
from tests.mutants.catalogue import MUTANTS
from tests.mutants.layer import Faulty

WORKER = "tests.mutants.worker"


def with_mutant(name: str) -> Target:
    """The CPU, for a worker on a library with this planted fault."""
    return Target("cpu", 0, environment={"MUTANT": name, "CUDA_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""})


if __name__ == "__main__":
    vars(worker)["Library"] = MUTANTS.get(os.environ["MUTANT"], Faulty)
    worker.main()
