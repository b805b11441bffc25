"""Faults by the thousand: each CUDA call that a case makes is made to fail, and the report must name that very call.

    python -m tests.gpu.campaign --build DIR --target dry:h200 --shard 0/4

A shard takes every fourth call. It prints a line of JSON a fault.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isolate import case as cases
from isolate.case import Case
from isolate.errors import ModelError
from isolate.fault import Fault
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from isolate.trace.origin import MESSENGERS, find_origin
from isolate.trace.record import Kind, Record
from isolate.trace.ring import Ring

WORKER = "tests.gpu.injecting_worker"
#: Errors that calls of a kind return at once: of the runtime and the driver, of cuBLAS.
CODES: dict[Kind, tuple[int, ...]] = {
    **dict.fromkeys((Kind.LAUNCH, Kind.GRAPH), (1, 2, 98, 209, 701)),
    **dict.fromkeys((Kind.COPY, Kind.SET, Kind.MEMORY, Kind.SYNC, Kind.STREAM), (1, 2, 400, 801)),
    Kind.BLAS: (1, 3, 7, 13, 14),
    Kind.QUERY: (1, 101),
}
#: A thread that an abort stopped keeps what it has on the device.
FAULTS_A_CHILD = 24


def _pattern(count: int, first: int = 0) -> dict[str, int]:
    return {"count": count, "first": first, "stride": 7, "modulo": 120}


def _case(name: str, model: dict[str, Any], context: dict[str, Any], steps: list[dict[str, Any]]) -> Case:
    data = {"isolate": 1, "model": model, "context": {"n_ctx": 512, "n_batch": 256, "n_ubatch": 64, **context}}
    return cases.parse(json.dumps({**data, "steps": steps}).encode(), name)


def _decode(*runs: tuple[int, Any]) -> dict[str, Any]:
    return {"step": "decode", "batch": [{"slot": slot, "tokens": tokens} for slot, tokens in runs]}


#: Together they launch kernels of every sort that these models have, use CUDA graphs, cuBLAS and both pools.
CASES = {
    "graphs": _case(
        "graphs",
        {"zoo": "qwen35moe", "type": "q3_k"},
        {"n_seq_max": 1, "type_k": "q8_0", "type_v": "q8_0", "flash_attn_type": "enabled"},
        [_decode((0, _pattern(20))), *(_decode((0, [token])) for token in (3, 1, 4, 1))],
    ),
    "cublas": _case(
        "cublas",
        {"zoo": "llama", "type": "f32"},
        {"n_seq_max": 2, "type_k": "f16", "type_v": "f16", "flash_attn_type": "disabled"},
        [
            _decode((0, _pattern(40)), (1, _pattern(40, 5))),
            {"step": "save", "slot": 0, "name": "saved"},
            {"step": "seq_rm", "slot": 0},
            {"step": "load", "name": "saved"},
            _decode((0, [3]), (1, [4])),
        ],
    ),
    "slots": _case(
        "slots",
        {"zoo": "lfm2", "type": "q8_0"},
        {"n_seq_max": 2, "type_k": "f16", "type_v": "f16", "flash_attn_type": "enabled"},
        [
            _decode((0, _pattern(24)), (1, _pattern(18, 5))),
            {"step": "checkpoint", "slot": 0, "name": "kept"},
            _decode((0, [3, 1, 4]), (1, [1])),
            {"step": "restore", "name": "kept"},
            {"step": "seq_rm", "slot": 0, "p0": 24},
            _decode((0, [5]), (1, [9])),
        ],
    ),
}


@dataclass(frozen=True)
class Injection:
    """A call that is made to fail: the `number`th of its kind in the case, from 1."""

    case: str
    kind: str
    number: int
    code: int
    #: the child dies of it, instead of only the thread
    die: bool = False

    @property
    def about(self) -> str:
        return f"fail {self.kind} {self.number} {self.code}{' die' if self.die else ''}"


@dataclass(frozen=True)
class Verdict:
    """What the report said of it."""

    injection: Injection
    #: named: the fault is laid at that call. handled: the library went on, and the trace has that call as the first that
    #: failed. refused: the same, and the library said no. wrong: anything else.
    result: str
    call: str = ""
    detail: str = ""


def injections(clean: dict[str, list[Record]]) -> Iterator[Injection]:
    """Every call of every case once, with the codes of its kind in turn."""
    for case, records in clean.items():
        for kind, codes in CODES.items():
            for number in range(
                1, 1 + sum(record.kind == kind and record.call not in MESSENGERS for record in records)
            ):
                yield Injection(case, kind.name, number, codes[number % len(codes)], number % 16 == 5)


class Campaign:
    """The cases on one build and target, in children that are used again while they live."""

    def __init__(self, build: str | None, target: str, folder: Path) -> None:
        self.trace = folder / "trace"
        self.children = Supervisor(build, None, find(target, build), 60, self.trace, WORKER)
        self.since_fresh = 0

    def run(self, case: str, about: str) -> tuple[Fault | None, bool]:
        """The fault, and whether the library refused the model or the context."""
        try:
            return self.children.run(replace_about(CASES[case], about)).fault, False
        except ModelError:
            return None, True

    def ring(self) -> Ring:
        """The trace of the child while it lives, the copy of it once the child died."""
        child = self.children._child
        return Ring(self.trace if child is None else child.trace)

    def clean(self) -> dict[str, list[Record]]:
        """What each case calls when nothing fails, in a child that has run it before."""
        found = {}
        for case in CASES:
            for _ in range(2):
                fault, refused = self.run(case, "clean")
                assert fault is None and not refused, fault
            with self.ring() as ring:
                found[case] = list(ring.records())
        return found

    def judge(self, injection: Injection, clean: list[Record]) -> Verdict:
        """Make the call fail and hold the report against it."""
        kind = Kind[injection.kind]
        fault, refused = self.run(injection.case, injection.about)
        with self.ring() as ring:
            records = list(ring.records())
            failures = ring.failures()
            found = find_origin(ring)
        self.since_fresh += fault is not None or refused
        begun = sum(record.call == "cudaStreamBeginCapture" for record in records)
        ended = sum(record.call == "cudaStreamEndCapture" and not record.injected for record in records)
        # In a capture, and while it frees a context, ggml holds a lock that the next case would wait for.
        locked = begun > ended or (fault is not None and fault.step.kind == "close")
        if self.since_fresh >= FAULTS_A_CHILD or locked or injection.die:
            self.children.fresh()
            self.since_fresh = 0
        struck = [record for record in records if record.injected]
        if len(struck) != 1:
            return Verdict(injection, "wrong", detail=f"{len(struck)} calls were struck; {fault}")
        call = struck[0]
        meant = [record for record in clean if record.kind == kind and record.call not in MESSENGERS][
            injection.number - 1
        ]
        if (meant.call, meant.name) != (call.call, call.name):
            return Verdict(injection, "wrong", call.call, f"not the call of the clean run, {meant.call} {meant.name}")
        blamed = [failure.record.number for failure in failures if failure.record.call not in MESSENGERS]
        if blamed[:1] != [call.number]:
            return Verdict(injection, "wrong", call.call, f"the first that failed: {failures[:1]}")
        if fault is None:
            return Verdict(injection, "refused" if refused else "handled", call.call)
        origin = found.origin if found else None
        if (
            fault.kind == "cuda"
            and (fault.origin.call, fault.origin.code) == (call.call, injection.code)
            and fault.evidence["exact"]
            and origin is not None
            and origin.number == call.number
            and (kind != Kind.LAUNCH or (fault.launch and fault.launch.number == injection.number))
            and (not fault.launch or fault.launch.kernel == call.name)
        ):
            return Verdict(injection, "named", call.call)
        return Verdict(injection, "wrong", call.call, f"{fault.kind}: {fault.origin} at {origin}; {fault.explanation}")


def replace_about(case: Case, about: str) -> Case:
    """The same case with other words about it."""
    return cases.parse(json.dumps({**case.as_json(), "about": about}).encode(), "campaign")


def main() -> None:
    """Print a verdict a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build")
    parser.add_argument("--target", required=True)
    parser.add_argument("--shard", default="0/1")
    options = parser.parse_args()
    shard, of = map(int, options.shard.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(options.build, options.target, Path(folder))
        with campaign.children:
            clean = campaign.clean()
            for place, injection in enumerate(injections(clean)):
                if place % of == shard:
                    verdict = campaign.judge(injection, clean[injection.case])
                    print(json.dumps(asdict(verdict)), flush=True)


if __name__ == "__main__":
    main()
