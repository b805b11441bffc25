"""What runs the graph: a small description of each target that the child is set up with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from isolate.errors import DeviceError


@dataclass(frozen=True)
class Target:
    """How a child is prepared so that this target runs the graph."""

    name: str
    #: layers of the model that go to the GPU
    gpu_layers: int
    #: libraries to load before the build's, in this order
    before: tuple[Path, ...] = ()
    #: set in the child's environment
    environment: dict[str, str] = field(default_factory=dict)
    #: False where kernels are not run, so that results mean nothing
    computes: bool = True


def cpu() -> Target:
    """The CPU: no layer on a GPU, no GPU to be seen."""
    return Target("cpu", 0, environment={"CUDA_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""})


def find(name: str) -> Target:
    """The target called `name`: cpu. DeviceError for any other."""
    if name == "cpu":
        return cpu()
    raise DeviceError(f"no target is called {name!r}; there is cpu")


def child_environment(target: Target) -> dict[str, str]:
    """The environment of a child: the parent's, the target's, and what keeps a dying ggml from starting a debugger."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1", **target.environment}
