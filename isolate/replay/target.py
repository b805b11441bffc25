"""What runs the graph: a small description of each target that the child is set up with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from isolate.errors import DeviceError
from isolate.library.find import Build, find_build
from isolate.trace import dry, gpus


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
    #: modes of the launch hooks, names of `isolate.trace.hooks.MODES`
    modes: tuple[str, ...] = ()
    #: first and last launch number between which each launch is synchronized
    window: tuple[int, int] | None = None

    @property
    def hooked(self) -> bool:
        """Nothing counts here unless the launch hooks see it."""
        return self.gpu_layers > 0

    def with_modes(self, *names: str, window: tuple[int, int] | None = None, graphs: bool = True) -> Target:
        """The same target with more modes of the hooks on, and CUDA graphs off where asked."""
        environment = self.environment if graphs else {**self.environment, "GGML_CUDA_DISABLE_GRAPHS": "1"}
        return replace(self, modes=(*self.modes, *names), window=window, environment=environment)


#: More layers than any model has: all of them go to the GPU.
ALL_LAYERS = 9999


def find(name: str, build: str | None = None, include: str | None = None) -> Target:
    """The target called `name`: cpu, cuda, or dry:GPU (several with commas) for a build. DeviceError for any other."""
    if name == "cpu":
        # No GPU is to be seen, so that a build with a GPU backend has none to prefer.
        return Target("cpu", 0, environment={"CUDA_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""})
    if name == "cuda":
        return Target("cuda", ALL_LAYERS)
    kind, _, chosen = name.partition(":")
    if kind != "dry" or not chosen:
        raise DeviceError(
            f"no target is called {name!r}; there is cpu, cuda, and dry:GPU with {', '.join(gpus.names())}"
        )
    device = dry.prepare(gpus.find_all(chosen), device_libraries(find_build(build, include)))
    return Target(name, ALL_LAYERS, device.before, device.environment, computes=False)


def device_libraries(build: Build) -> list[Path]:
    """The libraries of a build that may hold device code: those that are linked, and the backends it loads by itself."""
    backends = sorted(build.backends.glob("libggml-cuda*.so*")) if build.backends else []
    return [*build.ggml, *backends, build.llama]


def child_environment(target: Target) -> dict[str, str]:
    """The environment of a child: the parent's, the target's, and what keeps a dying ggml from starting a debugger."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1", **target.environment}
