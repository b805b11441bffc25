"""The child's hold on the hooks: which modes they are in, and the proof that a build's CUDA calls go through them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from isolate.errors import DeviceError
from isolate.trace.record import Kind
from isolate.trace.ring import Writer

#: enum isolate_mode: what each mode is called, and what it changes for the program under the hooks
MODES = {
    "sync": (1, "the stream is synchronized after each launch, cuBLAS call and copy or set within the device"),
    "window": (2, "the same, only between two launch numbers"),
    "no-vmm": (4, "the device seems to have no virtual memory, so ggml's pool gives each buffer its own allocation"),
    "fence": (8, "each allocation ends at an unmapped page (up to 15 bytes behind it stay unguarded); implies no-vmm"),
    "poison": (16, "fresh device memory is full of NaN bytes"),
    "fence-before": (32, "each allocation begins after an unmapped page; implies no-vmm"),
}


#: The callback API is the same in both.
CUPTI = ("libcupti.so.13", "libcupti.so.12")


class _Live(ctypes.Structure):
    """isolate_live (native/trace.h)."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("libraries", "hooked", "unrecorded", "uncovered", "elsewhere", "unresolved")
    )


@dataclass(frozen=True)
class Live:
    """How the CUDA calls of the loaded libraries are bound, counted in imports."""

    #: libraries that have device code and call a shared CUDA runtime
    libraries: int
    hooked: int
    #: without a hook, and they cannot fail: registration, names of errors
    unrecorded: int
    #: without a hook; each is a NOTE of the trace
    uncovered: int
    #: bound past their hook; each is a NOTE of the trace
    elsewhere: int
    #: not bound before they are called first
    unresolved: int

    def why_not(self) -> str:
        """Why launches would not be seen; "" where they are."""
        if not self.libraries:
            return (
                "no loaded library calls a shared CUDA runtime: the build has no CUDA backend, or its runtime is linked "
                "into it (CUDA_USE_STATIC_CUDA_RUNTIME, -cudart static)"
            )
        if self.elsewhere or not self.hooked:
            return (
                f"{self.elsewhere} of the build's CUDA calls are bound past the hooks: libcudart was loaded globally "
                "before them, or the build was loaded with RTLD_DEEPBIND"
            )
        return ""


class Hooks:
    """The hooks of the trace that `writer` has open."""

    def __init__(self, writer: Writer) -> None:
        self._library = writer.library
        self._library.isolate_trace_mode.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
        self._library.isolate_trace_mode.restype = None
        self._library.isolate_trace_pass.argtypes = [ctypes.c_bool]
        self._library.isolate_trace_pass.restype = None
        self._library.isolate_trace_inject.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int32]
        self._library.isolate_trace_inject.restype = None
        self._library.isolate_trace_live.restype = None

    def set_modes(self, names: Iterable[str], window: tuple[int, int] | None = None) -> None:
        """Turns these modes on and the others off; `window` are the first and last launch numbers of mode window."""
        wanted = {*names, *(["window"] if window else [])}
        unknown = wanted - set(MODES)
        if unknown:
            raise DeviceError(f"no mode of the hooks is called {sorted(unknown)[0]!r}; there is {', '.join(MODES)}")
        self._library.isolate_trace_mode(sum(MODES[name][0] for name in wanted), *(window or (0, 0)))

    def pass_on(self, wanted: bool) -> None:
        """For measuring what the hooks cost: while wanted, this thread's calls are handed on and nothing else is done."""
        self._library.isolate_trace_pass(wanted)

    def inject(self, kind: Kind, number: int, code: int) -> None:
        """For tests: call `number` of a kind, from 1, is not made and returns `code`; code 0 takes that back."""
        self._library.isolate_trace_inject(kind, number, code)

    def attach_cupti(self, modes: Iterable[str] = ()) -> str:
        """Lets CUPTI's callbacks record instead, where the hooks cannot; says why not, "" where it does."""
        for mode in modes:
            if mode not in ("sync", "window"):
                return f"mode {mode} changes what CUDA answers, which CUPTI cannot"
        for name in CUPTI:
            code = self._library.isolate_trace_cupti(name.encode())
            if code == 0:
                return ""
            if code > 0:
                return (
                    f"CUPTI refused (CUptiResult {code}): another tool is subscribed, or the driver does not allow it"
                )
        return f"CUPTI was not found ({' and '.join(CUPTI)} in the linker's path)"

    def live(self) -> Live:
        """Reads what every CUDA import of the loaded libraries is bound to."""
        live = _Live()
        self._library.isolate_trace_live(ctypes.byref(live))
        return Live(*(getattr(live, name) for name, *_ in _Live._fields_))
