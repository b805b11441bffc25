"""Pin a fault down: a cheap pass that sees whether a case fails, then a deep pass that names what was being computed.

The deep pass replays the same case node by node in a new child. It must see the same signature; where it does not, the
finding says so and keeps what the cheap pass saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from isolate.case import Case, Check
from isolate.fault import Fault, Finding, Signature
from isolate.replay.supervisor import TIMEOUT, Supervisor
from isolate.replay.target import Target


@dataclass(frozen=True)
class Settings:
    """How cases are run."""

    target: Target
    build: str | None = None
    include: str | None = None
    check: tuple[Check, ...] = ()
    deep: bool = False
    repeat: int = 1
    timeout: float = TIMEOUT
    #: where to keep the trace of the last run
    trace: Path | None = None


@dataclass(frozen=True)
class Result:
    """What came of running one case, `repeat` times."""

    findings: tuple[Finding, ...]
    runs: int
    #: steps that the last run completed
    steps: int
    seconds: float
    #: what a check could not judge, and why
    notes: tuple[str, ...]


def supervisor(settings: Settings) -> Supervisor:
    """A supervisor for children with these settings."""
    return Supervisor(settings.build, settings.include, settings.target, settings.timeout, settings.trace)


def pin(children: Supervisor, case: Case, folder: Path, settings: Settings, replay: str) -> Result:
    """Run a case `repeat` times, each in a child of its own when there is more than one, and explain what failed.

    `folder` is where a relative model path starts; `replay` is the command that does this again. IsolateError when the
    case, the model or the build is not usable.
    """
    seen: dict[Signature, list[Fault]] = {}
    outcome = None
    for _ in range(settings.repeat):
        if settings.repeat > 1:
            children.fresh()
        outcome = children.run(case, settings.check, folder)
        if outcome.fault is not None:
            seen.setdefault(outcome.fault.signature, []).append(outcome.fault)
    assert outcome is not None
    findings = []
    for faults in seen.values():
        fault = faults[0]
        if settings.deep:
            fault = deepen(children, case, folder, settings, fault)
        findings.append(Finding(case.as_json(), fault, len(faults), settings.repeat, replay))
    return Result(tuple(findings), settings.repeat, outcome.steps, outcome.seconds, outcome.notes)


def deepen(children: Supervisor, case: Case, folder: Path, settings: Settings, fault: Fault) -> Fault:
    """The fault with the graph node that was being computed, from a replay node by node."""
    children.fresh()
    outcome = children.run(case, settings.check, folder, deep=True)
    children.fresh()
    again = outcome.fault
    if again is None:
        return replace(fault, explanation=f"{fault.explanation}; evaluated node by node it does not fail")
    if again.signature != fault.signature:
        return replace(
            fault, explanation=f"{fault.explanation}; evaluated node by node it fails otherwise: {again.signature}"
        )
    return replace(fault, node=again.node)


def expected(case: Case, result: Result) -> bool:
    """The case ended as its `expect` says."""
    if isinstance(case.expect, str):
        return not result.findings
    wanted = case.expect
    return bool(result.findings) and all(
        finding.fault.kind == wanted.kind
        and finding.fault.step.kind == wanted.step
        and wanted.where in finding.fault.signature.where
        for finding in result.findings
    )


def pin_all(cases: list[tuple[Case, Path, str]], settings: Settings) -> Iterator[Result]:
    """Pin each of (case, folder, replay command), in the order given, in one warm child while it lives."""
    with supervisor(settings) as children:
        for case, folder, replay in cases:
            yield pin(children, case, folder, settings, replay)
