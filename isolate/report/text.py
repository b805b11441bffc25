"""A finding for a person at a terminal: the fault in one line, then what it was, where, and how to see it again."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from isolate.case import Case
from isolate.fault import Call, Fault, Finding, Launch, Node, StepInFlight
from isolate.recipes import Recipe
from isolate.search.pin import Result, wanted
from isolate.trace.record import ATTRIBUTES

LABEL = 12
#: Numbers shown of a series.
SERIES = 8
#: Evidence that the lines above it say already, or that is for a program.
NOT_SHOWN = frozenset({"exact", "launches", "slot", "position", "again", "begins"})
#: Attributes of a launch that belong to its kernel; the device's limits stay in the JSON.
OF_A_KERNEL = frozenset(ATTRIBUTES)


def finding(found: Finding) -> str:
    """The whole report of one finding, ending with the command that replays it."""
    lines = [headline(found.fault), *_body(found.fault)]
    lines += _labelled("seen", f"{found.times} of {found.of} runs")
    lines += _labelled("replay", found.replay)
    return "\n".join(lines)


def headline(fault: Fault) -> str:
    """The fault in one line."""
    return f"FAULT  {fault.kind} in {_step(fault.step)}: {fault.explanation}"


def _body(fault: Fault) -> Iterator[str]:
    yield from _labelled("origin", _call(fault.origin, fault.explanation))
    if fault.report != fault.origin:
        yield from _labelled("report", _call(fault.report, fault.explanation) + "  (noticed it, did not cause it)")
    if fault.step.tokens:
        slots = ", ".join(f"slot {slot}: {count}" for slot, count in fault.step.tokens.items())
        yield from _labelled("tokens", f"{slots} (together {sum(fault.step.tokens.values())})")
    if fault.node:
        yield from _labelled("node", _node(fault.node))
    if fault.launch:
        yield from _labelled("launch", _launch(fault.launch))
        if fault.launch.attributes:
            pairs = ", ".join(
                f"{name} {value}" for name, value in fault.launch.attributes.items() if name in OF_A_KERNEL
            )
            yield from _labelled("kernel", pairs)
    numbers = {name: value for name, value in fault.evidence.items() if isinstance(value, int | float | str)}
    plain = {name: value for name, value in numbers.items() if "\n" not in str(value) and name not in NOT_SHOWN}
    if plain:
        told = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in plain.items())
        yield from _labelled("evidence", told)
    for name, value in fault.evidence.items():
        if name not in plain and name not in NOT_SHOWN:
            yield from _evidence(name, value)
    for number, launch in enumerate(fault.before):
        yield from _labelled("before" if number == 0 else "", _launch(launch))
    for number, line in enumerate(fault.log):
        yield from _labelled("log" if number == 0 else "", line)


def _evidence(name: str, value: object) -> Iterator[str]:
    """One entry of the evidence: a list or a text of several lines goes a line each."""
    if isinstance(value, dict):
        lines = [f"{key}: {text}" for key, text in value.items()]
    elif isinstance(value, str):
        lines = value.strip().splitlines()
    else:
        lines = [str(item) for item in value] if isinstance(value, list | tuple) else [_number(value)]
    for number, line in enumerate(lines):
        yield from _labelled(name.replace("_", " ") if number == 0 else "", line)


def _labelled(label: str, text: str) -> list[str]:
    return [f"  {label:<{LABEL}} {text}"]


def _step(step: StepInFlight) -> str:
    return f"`{step.kind}`" if step.index is None else f"step {step.index} `{step.kind}`"


def _call(call: Call, said: str) -> str:
    """A call, with its own words where they were not `said` already."""
    place = f" at {call.file}:{call.line}" if call.file else ""
    code = "" if call.code is None else f" = {call.code}"
    text = f": {call.text}" if call.text and call.text not in said else ""
    return f"{call.call}{code}{place}{text}"


def _node(node: Node) -> str:
    shape = " x ".join(str(n) for n in node.shape)
    sources = f" from {', '.join(node.sources)}" if node.sources else ""
    return f"{node.index}: {node.op} {node.name} {node.type} [{shape}]{sources}"


def _launch(launch: Launch) -> str:
    grid, block = (",".join(str(n) for n in size) for size in (launch.grid, launch.block))
    code = f" = {launch.code}" if launch.code else ""
    name = launch.demangled or launch.kernel
    return f"{launch.number}: {name} grid ({grid}) block ({block}) shared {launch.shared}{code}"


def _number(value: object) -> str:
    if isinstance(value, list) and len(value) > SERIES:
        value = [*value[: SERIES // 2], "...", *value[-SERIES // 2 :]]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def result(path: Path, case: Case, found: Result, right: bool | None) -> str:
    """What came of one case: a line, the notes, and each finding in full. `right`: it ended as the case says."""
    word = "fault" if found.findings else "pass"
    model = case.model.zoo if isinstance(case.model.zoo, str) else Path(str(case.model.file)).name
    steps = f"{len(case.steps)} step{'s' if len(case.steps) != 1 else ''}"
    runs = f", {found.runs} runs" if found.runs > 1 else ""
    checked = f"; checked {', '.join(found.checked)}" if found.checked else ""
    verdict = {None: "", True: "  (as expected)", False: f"  (NOT as expected: {_expected(case, found)})"}[right]
    lines = [f"{word:<6} {path}  {steps} of {model} on {found.target}{runs}, {found.seconds:.2f} s{checked}{verdict}"]
    if case.about and (found.findings or right is False):
        lines += textwrap.wrap(case.about, 110, initial_indent="       ", subsequent_indent="       ")
    lines += [f"       note: {note}" for note in found.notes]
    lines += [textwrap.indent(finding(each), "       ") for each in found.findings]
    return "\n".join(lines)


def _expected(case: Case, found: Result) -> str:
    fault = wanted(case, found.target)
    return (
        "it should pass" if fault is None else f"it should fail with {fault.kind} in {fault.step} {fault.where}".strip()
    )


def summary(runs: Sequence[tuple[Path, Case, Result, bool]], not_run: int, expected: bool) -> str:
    """One line over several cases and, where `expected` was asked, one for each that ended otherwise."""
    faults = sum(bool(found.findings) for _, _, found, _ in runs)
    parts = [f"{len(runs)} cases: {len(runs) - faults} pass, {faults} with a fault"]
    if not_run:
        parts.append(f"{not_run} not run")
    wrong = [(path, case, found) for path, case, found, right in runs if expected and not right]
    if expected:
        right = "all as expected" if not not_run else "what ran, as expected"
        parts.append(right if not wrong else f"{len(wrong)} NOT as expected")
    lines = ["; ".join(parts)]
    for path, case, found in wrong:
        ends = ", ".join(str(each.fault.signature) for each in found.findings)
        lines.append(f"       {path}: {_expected(case, found)}, and {f'failed with {ends}' if ends else 'passed'}")
    return "\n".join(lines)


def zoo(recipes: Mapping[str, Recipe]) -> str:
    """The zoo's models, a line each."""
    return "\n".join(f"{name:<14} {recipe.memory:<10} {recipe.about}" for name, recipe in recipes.items())
