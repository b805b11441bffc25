"""What compiled code says about one kernel: how it may be launched, and what a block of it needs."""

from __future__ import annotations

import msgspec

Dimensions = tuple[int, int, int]


class Bounds(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel in one compiled version. What the version does not say is None."""

    #: as the linker knows it
    name: str
    #: `__launch_bounds__`: the most threads a block may have is the product
    max_threads: Dimensions | None = None
    #: `__block_size__`: the only block it may be launched with
    required_threads: Dimensions | None = None
    #: `__launch_bounds__`'s second number: blocks that must fit on a multiprocessor. PTX only
    min_blocks: int | None = None
    #: `__maxnreg__`: registers a thread at most. PTX only
    max_registers: int | None = None
    #: registers a thread. Machine code only; PTX gets its registers when the driver compiles it
    registers: int | None = None
    #: `__shared__` variables of fixed size, bytes a block
    static_shared: int = 0
    #: stack, bytes a thread. Machine code only
    local: int | None = None
    #: bytes of each parameter, in order
    parameters: tuple[int, ...] = ()
    #: `__cluster_dims__`: blocks of a cluster
    cluster: Dimensions | None = None
    #: `__launch_bounds__`'s third number: the most blocks a cluster may have
    max_cluster: int | None = None

    @property
    def most_threads(self) -> int | None:
        """Threads a block may have at most, as far as the code says."""
        if self.required_threads is None and self.max_threads is None:
            return None
        x, y, z = self.required_threads or self.max_threads or (1, 1, 1)
        return x * y * z
