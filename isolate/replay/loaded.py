"""The model in use: loaded once, kept from one case to the next while it stays the same."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from isolate.errors import ModelError
from isolate.library.bind import Library
from isolate.trace.ring import Writer


class Models:
    """The model in use, kept from one case to the next while it stays the same."""

    def __init__(self, library: Library, writer: Writer, gpu_layers: int, computes: bool = True) -> None:
        self.library = library
        self.writer = writer
        self.computes = computes
        self.gpu_layers = gpu_layers
        self.path: Path | None = None
        self.handle: int | None = None
        self.vocabulary = 0
        #: what is to be done before the model is freed: contexts of it are freed
        self.before_free: list[Callable[[], None]] = []

    def load(self, path: Path) -> int:
        """The loaded model's handle. ModelError when the library refuses the file."""
        if self.handle is not None and self.path == path:
            return self.handle
        self.free()
        if not path.is_file():
            raise ModelError(f"{path}: there is no such file" if not path.exists() else f"{path}: not a file")
        params = self.library.model_params()
        # An empty list of devices keeps a build with a GPU backend off it.
        none = (ctypes.c_void_p * 1)(None) if self.gpu_layers == 0 else None
        self.library.set_params(params, {"n_gpu_layers": self.gpu_layers, "devices": none}, "model")
        if not self.computes:
            # A mapped file would fill the memory of this machine with weights that nothing looks at.
            unmapped = {"load_mode": "direct_io"} if hasattr(params, "load_mode") else {"use_mmap": False}
            self.library.set_params(params, unmapped, "model")
        self.writer.routine("llama_model_load_from_file")
        handle = self.library.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise ModelError(f"{path}: the build could not load it as a model")
        self.path, self.handle = path, handle
        self.vocabulary = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(handle))
        return int(handle)

    def free(self) -> None:
        """Give the model back."""
        while self.before_free:
            self.before_free.pop()()
        if self.handle is not None:
            self.library.llama_model_free(self.handle)
        self.path = self.handle = None
