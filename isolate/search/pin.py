"""Pin a fault down: a cheap pass that sees whether a case fails, then deep passes that name what was being computed.

Each deep pass replays the same case in a new child and must see the same error; where it does not, the finding says so
and keeps what the pass before it saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from isolate.case import CHECKS, JUDGED_BY, NEED_NO_RESULTS, Case, Check, Expect
from isolate.errors import IsolateError
from isolate.fault import Fault, Finding, Signature
from isolate.replay.supervisor import TIMEOUT, Outcome, Supervisor
from isolate.replay.target import Target

#: Launches that are synchronized one by one in a replay of a long run, before the launch that showed the error.
WINDOW = 20_000


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
    #: the child's module
    worker: str = "isolate.replay.worker"


@dataclass(frozen=True)
class Job:
    """A case to run, the folder where a relative model path starts, and the command that runs it again."""

    case: Case
    folder: Path
    replay: str


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
    target: str
    #: the oracles that were asked
    checked: tuple[Check, ...]


def supervisor(settings: Settings) -> Supervisor:
    """A supervisor for children with these settings."""
    return Supervisor(
        settings.build, settings.include, settings.target, settings.timeout, settings.trace, settings.worker
    )


def pin_all(jobs: list[Job], settings: Settings) -> Iterator[Result | IsolateError]:
    """Pin each job, in the order given, in one warm child while it lives.

    A case that is not usable here is an error in its place; a build that is not usable is raised.
    """
    with supervisor(settings) as children:
        children.start()
        for job in jobs:
            try:
                yield pin(children, job, settings)
            except IsolateError as error:
                yield error


def pin(children: Supervisor, job: Job, settings: Settings) -> Result:
    """Run a case `repeat` times, each in a child of its own when there is more than one, and explain what failed."""
    seen: dict[Signature, list[Fault]] = {}
    outcome = None
    for _ in range(settings.repeat):
        outcome = children.run(job.case, settings.check, job.folder)
        if settings.repeat > 1:
            children.fresh()
        if outcome.fault is not None:
            seen.setdefault(outcome.fault.signature, []).append(outcome.fault)
    assert outcome is not None
    findings = []
    for faults in seen.values():
        fault = deepen(job, settings, faults[0]) if settings.deep else faults[0]
        if fault.step.kind == "check":
            fault = _said(fault, "it came in what --check decodes to compare with; the step itself had passed")
        if not settings.target.computes and fault.kind not in ("cuda", "leak", "slow"):
            fault = _said(
                fault, "device memory reads as zeros here: host code that looks at a result may fail for that alone"
            )
        findings.append(Finding(job.case.as_json(), fault, len(faults), settings.repeat, job.replay))
    checked = tuple(name for name in CHECKS if name in {*job.case.checks(), *settings.check})
    notes = (*target_notes(settings.target, checked), *outcome.notes)
    judged = checked if settings.target.computes else tuple(name for name in checked if name in NEED_NO_RESULTS)
    return Result(tuple(findings), settings.repeat, outcome.steps, outcome.seconds, notes, settings.target.name, judged)


def target_notes(target: Target, checks: tuple[Check, ...]) -> tuple[str, ...]:
    """What is to be said of every run on a target that runs no kernels, and of the checks that it leaves out."""
    if target.computes:
        return ()
    left = [name for name in checks if name not in NEED_NO_RESULTS]
    skipped = f", so {', '.join(left)} cannot be judged" if left else ""
    return (f"only launches and the library's own code are tried on {target.name}, results are not computed{skipped}",)


def deepen(job: Job, settings: Settings, fault: Fault) -> Fault:
    """The fault with the exact launch, where it was asynchronous or inside a CUDA graph, and with its graph node."""
    if fault.kind in ("logits", "nan"):
        return _beside(job, settings, fault)
    if fault.kind in JUDGED_BY:
        return _said(fault, "no graph node to name: what is wrong is not one call")
    settings = replace(settings, trace=None)
    if fault.kind == "cuda":
        if fault.origin.call.startswith("cudaGraph") or (fault.launch and fault.launch.capturing):
            fault, settings = _without_graphs(job, settings, fault)
        if not fault.evidence["exact"]:
            fault, settings = _synchronized(job, settings, fault)
    again = _replay(job, settings, deep=True).fault
    if again is None:
        return _said(fault, "evaluated node by node it does not fail")
    if not _same(fault, again):
        return _said(fault, f"evaluated node by node it fails otherwise: {again.signature}")
    if again.node is None:
        return _said(fault, "no graph node to name: nothing was being computed")
    return replace(fault, node=again.node)


def _beside(job: Job, settings: Settings, fault: Fault) -> Fault:
    """The fault with the node where the wrong result begins, as the child found it beside the slot alone."""
    again = _replay(job, replace(settings, trace=None), deep=True).fault
    if again is None:
        return _said(fault, "evaluated node by node it does not happen")
    if not _same(fault, again):
        return _said(fault, f"evaluated node by node it fails otherwise: {again.signature}")
    return replace(again, log=fault.log)


def _without_graphs(job: Job, settings: Settings, fault: Fault) -> tuple[Fault, Settings]:
    """What a replay without CUDA graphs sees: a launch inside a graph has no record of its own."""
    settings = replace(settings, target=settings.target.with_modes(graphs=False))
    again = _replay(job, settings).fault
    if again is None:
        return _said(fault, "with CUDA graphs off it does not happen"), settings
    if again.kind != "cuda" or again.origin.code != fault.origin.code:
        return _said(fault, f"with CUDA graphs off it fails otherwise: {again.signature}"), settings
    return _said(again, "with CUDA graphs on it came inside a graph, with them off it happens too"), settings


def _synchronized(job: Job, settings: Settings, fault: Fault) -> tuple[Fault, Settings]:
    """The first launch after which the device is in error, from replays that synchronize after each."""
    graphless = replace(settings, target=settings.target.with_modes(graphs=False))
    bound = _replay(job, graphless).fault
    if bound is None or bound.origin.code != fault.origin.code:
        return _said(fault, "with CUDA graphs off it does not happen, so no single launch can be named"), settings
    last = int(bound.evidence["launches"])
    first = max(1, last - WINDOW)
    while True:
        narrowed = replace(settings, target=settings.target.with_modes(window=(first, last), graphs=False))
        again = _replay(job, narrowed).fault
        if again is None or again.origin.code != fault.origin.code:
            return _said(fault, "synchronized after each launch it does not happen: the launches race"), settings
        # Not exact: the device was in error before the first launch of the window.
        if again.evidence["exact"] or first == 1:
            return again, narrowed
        first, last = max(1, first - 4 * WINDOW), first


def _replay(job: Job, settings: Settings, deep: bool = False) -> Outcome:
    with supervisor(settings) as children:
        return children.run(job.case, settings.check, job.folder, deep)


def _same(fault: Fault, again: Fault) -> bool:
    """The same fault as far as another way of evaluating can show it: kernels may be others when nothing is fused."""
    if fault.kind == "cuda":
        return again.kind == "cuda" and again.origin.code == fault.origin.code and again.step == fault.step
    return again.signature == fault.signature


def _said(fault: Fault, what: str) -> Fault:
    return replace(fault, explanation=f"{fault.explanation}; {what}")


def wanted(case: Case, target: str) -> Expect | None:
    """The fault that a case should give on a target; None where it should pass."""
    if isinstance(case.expect, str) or (case.expect.on == "gpu" and target == "cpu"):
        return None
    return case.expect


def expected(case: Case, result: Result) -> bool:
    """The case ended as its `expect` says."""
    fault = wanted(case, result.target)
    if fault is None:
        return not result.findings
    return bool(result.findings) and all(fault.given_by(finding.fault) for finding in result.findings)
