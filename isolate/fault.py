"""What went wrong, with its origin (the call that failed) and its report (the place that noticed).

Plain records: the writers in `report/` turn them into text and JSON, the searches compare their signatures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: Every way a run can go wrong. A fault's kind is one of these.
KINDS = {
    "assert": "GGML_ASSERT or GGML_ABORT ended the process",
    "exception": "a C++ exception that nobody caught ended the process",
    "signal": "the process died of a signal it raised itself (SIGSEGV, SIGBUS, SIGFPE, ...)",
    "hang": "a step took longer than the time limit",
    "oom": "the kernel killed the process for want of memory",
    "killed": "somebody killed the process",
    "exit": "the process ended by itself in the middle of a step",
    "decode": "llama_decode (or llama_process) did not return what it should",
    "state": "a state call returned 0, or not the size it should",
    "memory": "a memory call (seq_rm and its kin) did not return what it should",
    "positions": "llama_memory_seq_pos_min/max disagree with what was decoded",
    "nan": "a requested logit is NaN or infinite",
    "cells": "a state saved, restored and saved again does not hold the same cells",
    "logits": "logits differ from those of the same tokens decoded alone, beyond the measured noise",
    "leak": "what is in use grows over equal rounds of steps, after which the slots hold the same",
    "slow": "the same rows took twice the ubatches or launches in other slots, or in another order",
    "cuda": "a CUDA, driver or cuBLAS call returned an error",
    "engine": "isolate's own code raised an exception in the child",
}
#: Those that the library ends the process with.
DEATHS = frozenset({"assert", "exception", "signal"})


@dataclass(frozen=True)
class Signature:
    """What makes two faults the same one."""

    kind: str
    #: the kernel, the routine, or `file:line: expression` without the folder
    where: str
    #: the error code of the call or the number of the signal; None where there is none
    code: int | None
    #: kind of the step in flight: decode, restore, ..., or `load`, `context` before the first step
    step: str

    def __str__(self) -> str:
        code = "" if self.code is None else f" ({self.code})"
        return f"{self.kind} in {self.step}: {self.where}{code}"


@dataclass(frozen=True)
class StepInFlight:
    """The step that was running: its number in the case, or None before the first (model load, context)."""

    index: int | None
    kind: str
    #: slot -> tokens given to it in this step
    tokens: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call to a library, or the place in its source, that failed or noticed a failure."""

    call: str
    #: what it returned, where it returned
    code: int | None = None
    #: the library's own words: an assertion, an error's name and meaning
    text: str = ""
    file: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Node:
    """A node of the ggml graph: what was being computed."""

    #: position in the graph of this decode, from 0, in the order of evaluation
    index: int
    op: str
    name: str
    type: str
    #: ne[0..3]
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A kernel launch as the hooks recorded it."""

    number: int
    call: str
    #: mangled, as the build registered it
    kernel: str
    demangled: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    #: dynamic shared memory, bytes
    shared: int
    device: int
    stream: int
    code: int
    capturing: bool = False
    #: cudaFuncGetAttributes of the kernel and the device's limits, where they were read
    attributes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """What went wrong. `origin` failed; `report` noticed; they are the same call in the simplest case."""

    kind: str
    signature: Signature
    step: StepInFlight
    origin: Call
    report: Call
    explanation: str
    node: Node | None = None
    launch: Launch | None = None
    #: numbers behind the explanation (an oracle's distance, noise and signal; limits; memory modes that were on)
    evidence: dict[str, Any] = field(default_factory=dict)
    #: last lines the library logged
    log: tuple[str, ...] = ()
    #: the launches before it, oldest first
    before: tuple[Launch, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of fault: {self.kind}")

    def as_json(self) -> dict[str, Any]:
        """Plain data for the `fault` field of the JSON schema."""
        return asdict(self)


@dataclass(frozen=True)
class Finding:
    """A fault, the case that gives it, how often it did, and the command that replays it."""

    #: the case as plain data (`Case.as_json`)
    case: dict[str, Any]
    fault: Fault
    #: the case gave this fault `times` of `of` runs
    times: int
    of: int
    replay: str

    def as_json(self) -> dict[str, Any]:
        """Plain data for one entry of `findings` in the JSON schema."""
        return {
            "case": self.case,
            "fault": self.fault.as_json(),
            "repeats": {"times": self.times, "of": self.of},
            "replay": self.replay,
        }
