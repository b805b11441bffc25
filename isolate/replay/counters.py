"""What a run uses, read after each step: work done by the step, and what is in use when it ended.

The native side counts where the calls pass. Only what the steps did is in the sums: what the other checks allocate and
compute in between, to compare with, is left out.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from isolate.case import Step
from isolate.fault import Fault
from isolate.replay import series
from isolate.replay.engine import Engine
from isolate.replay.reference import Reference
from isolate.replay.series import Sample

#: GGML_BACKEND_DEVICE_TYPE_GPU (ggml-backend.h).
_GPU = 1
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Counts(ctypes.Structure):
    """isolate_counts (native/trace.h)."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("computations", "launches", "graph_launches", "graphs", "allocations", "bytes")
    )


class Counters:
    """The counts of one case. Call `read` when a step was done, `keep` with what it was, `leave_out` before the next."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.samples: list[Sample] = []
        # Only there is it judged: a call that the case does not make is not made for nothing.
        self._repeats = series.repeats(engine.case.steps)
        self._read = engine.writer.library.isolate_trace_counts
        self._read.argtypes, self._read.restype = [ctypes.POINTER(_Counts)], None
        self._devices = self._on_gpus()
        self._sums = dict.fromkeys(self._now(), 0)
        self._before = self._now()
        self._step = dict(self._sums)

    def read(self) -> None:
        """Take the counts as the step left them."""
        now = self._now()
        self._step = {name: now[name] - self._before[name] for name in now}
        for name, change in self._step.items():
            self._sums[name] += change

    def keep(self, index: int, step: Step, reference: Reference) -> None:
        """Keep what was read, with what the slots should hold now."""
        held = {name: self._sums[name] for name in series.HELD if name in self._sums}
        if self._repeats and self.engine.memory:
            held["state bytes"] = sum(self._state(slot) for slot in range(self.engine.settings.n_seq_max))
        work = {name: self._step[name] for name in series.WORK}
        self.samples.append(Sample(index, step, self._fill(reference), work, held))

    def leave_out(self) -> None:
        """What was done since `read` is none of the case's doing."""
        self._before = self._now()

    def fault(self) -> Fault | None:
        """What the whole series shows."""
        return series.fault(self.samples)

    def _fill(self, reference: Reference) -> series.Fill | None:
        slots = [reference.slot(number) for number in range(self.engine.settings.n_seq_max)]
        if any(slot.unknown for slot in slots):
            return None
        kept = self.engine.kept.values()
        return series.Fill(
            tuple(len(slot.positions) for slot in slots),
            tuple(sum(slot.window.certain) for slot in slots),
            sum(len(kept_state.data) for kept_state in kept if kept_state.data is not None) + len(kept),
        )

    def _state(self, slot: int) -> int:
        """Bytes of a slot's state, as a server asks for them; the call for all slots at once aborts where some share a cell."""
        library = self.engine.library
        if library.has("llama_state_seq_get_size_ext"):
            return int(library.llama_state_seq_get_size_ext(self.engine.context, slot, 0))
        return int(library.llama_state_seq_get_size(self.engine.context, slot))

    def _now(self) -> dict[str, int]:
        counts = _Counts()
        self._read(ctypes.byref(counts))
        now = {
            "ubatches": counts.computations,
            "launches": counts.launches,
            "graph launches": counts.graph_launches,
            "resident bytes": _resident(),
        }
        if self._devices:
            now |= {"CUDA graphs": counts.graphs, "allocations": counts.allocations, "allocated bytes": counts.bytes}
            now["device bytes"] = -sum(self._free(device) for device in self._devices)
        return now

    def _on_gpus(self) -> list[int]:
        """The GPUs, where the model's layers are on them."""
        library = self.engine.library
        if not self.engine.models.gpu_layers:
            return []
        every = [library.ggml_backend_dev_get(index) for index in range(library.ggml_backend_dev_count())]
        return [device for device in every if library.ggml_backend_dev_type(device) == _GPU]

    def _free(self, device: int) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.engine.library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        return free.value


@cache
def _statm() -> int:
    """Opened once: it is read twice a step."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _resident() -> int:
    """Memory of this process alone that is resident: not what it shares or maps from files, as the trace it writes."""
    _, resident, shared, *_ = os.pread(_statm(), 128, 0).split()
    return (int(resident) - int(shared)) * _PAGE
