"""What a model's memory can do, as far as a server's decisions depend on it.

The server asks the library: whether a tail can be removed, how far a sliding window reaches, whether cells can be
shifted, where a sequence begins, how large a state is. Here these are answered from the kind of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from isolate.recipes import Recipe
from isolate.serve.options import Options

#: llama.cpp rounds the size of a sliding window's cache up to this
PADDING = 256


@dataclass(frozen=True)
class Memory:
    """One kind of memory."""

    #: a tail of a sequence can be removed; recurrent memory can only forget all of it
    partial_removal: bool = True
    #: tokens a sliding window reaches back, 0 without one
    window: int = 0
    can_shift: bool = True
    #: cells are taken by every token; recurrent memory alone has one cell a sequence
    has_cells: bool = True
    #: of a whole state: what it has in any case, and what each token adds
    state_bytes: int = 0
    token_bytes: int = 1024
    #: of a checkpoint
    checkpoint_bytes: int = 64 << 10

    @classmethod
    def of(cls, recipe: Recipe) -> Memory:
        """That of a zoo model; sizes of states are rough, they decide only what is evicted from a full cache RAM."""
        recurrent = not recipe.partial_removal
        return cls(
            partial_removal=recipe.partial_removal,
            window=recipe.window,
            can_shift=recipe.shift,
            has_cells=recipe.memory != "recurrent",
            state_bytes=64 << 10 if recurrent else 0,
        )

    def server_window(self, options: Options) -> int:
        """The window as the server sees it: none with `swa-full`."""
        return 0 if options.swa_full else self.window

    def shifts(self, options: Options) -> bool:
        """llama_memory_can_shift: a window's cache can only where it is as large as that of the other layers."""
        return self.can_shift and (self.window == 0 or options.swa_full)

    def takes_checkpoints(self, options: Options) -> bool:
        """Whether a slot of such memory ever gets a checkpoint: only where it cannot be rolled back."""
        return options.ctx_checkpoints > 0 and (not self.partial_removal or self.server_window(options) > 0)

    def first_position(self, count: int, options: Options, low: int = 0) -> int:
        """llama_memory_seq_pos_min of a slot of `count` tokens, -1 when it is empty.

        `low` is what it was before. Recurrent memory knows its last position only; a window's cells are used again,
        oldest first, when its cache is full.
        """
        if count == 0:
            return -1
        if not self.partial_removal:
            return count - 1
        window = self.server_window(options)
        if window == 0:
            return low
        slots = options.parallel if options.kv_unified else 1
        cells = min(options.slot_context(), window * slots + options.ubatch())
        return max(low, count - -(-cells // PADDING) * PADDING)
