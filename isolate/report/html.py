"""A finding as one self-contained page: the slots as lanes over the steps, the launches of the step that failed.

The page is `page.html` with the data put in as JSON, which the page shows as text only; it asks the network for nothing.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from isolate.case import Case, Decode, Load, Restore
from isolate.fault import Fault, Finding, Launch
from isolate.report import text as report_text
from isolate.search.needs import what_is_left
from isolate.search.without import slots
from isolate.trace.launch import kernel_name, launch_of
from isolate.trace.ring import Ring

_PAGE = Path(__file__).with_name("page.html")
#: what is launched against what allows it: name, the launch's own number, the attributes that limit it
_LIMITS: tuple[tuple[str, Callable[[Launch], int], tuple[str, ...]], ...] = (
    ("threads a block", lambda launch: launch.block[0] * launch.block[1] * launch.block[2], ("max_threads", "device_max_threads")),
    ("block x", lambda launch: launch.block[0], ("device_block_x",)),
    ("block y", lambda launch: launch.block[1], ("device_block_y",)),
    ("block z", lambda launch: launch.block[2], ("device_block_z",)),
    ("grid x", lambda launch: launch.grid[0], ("device_grid_x",)),
    ("grid y", lambda launch: launch.grid[1], ("device_grid_y",)),
    ("grid z", lambda launch: launch.grid[2], ("device_grid_z",)),
    ("dynamic shared memory, bytes", lambda launch: launch.shared, ("shared_dynamic_max", "device_shared_optin")),
)  # fmt: skip


def text(finding: Finding, case: Case, launches: Sequence[Launch] = ()) -> str:
    """The page. `launches`: all of the step that failed, from a trace; without them those that the finding has."""
    fault = finding.fault
    shown = launches or (*fault.before, *([fault.launch] if fault.launch else []))
    data = {
        "headline": report_text.headline(fault),
        "signature": str(fault.signature),
        "left": what_is_left(case),
        "facts": _facts(finding),
        "replay": finding.replay,
        "slots": slots(case),
        "n_ubatch": case.context.n_ubatch,
        "steps": _steps(case),
        "fault_step": fault.step.index,
        "launches": _launches(shown),
        "fault_launch": fault.launch.number if fault.launch else None,
        "limits": _limits(fault.launch) if fault.launch else [],
        "log": list(fault.log),
        "case": finding.case,
    }
    # `<` as an escape: nothing in the data can end the script element it stands in
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = _PAGE.read_text()
    return page.replace("<!--TITLE-->", html.escape(str(fault.signature))).replace("/*DATA*/", encoded)


def of_step(trace: Path, fault: Fault) -> list[Launch]:
    """The launches that a kept trace has of the step that failed."""
    with Ring(trace) as ring:
        records = ring.records()
        wanted = -1 if fault.step.index is None else fault.step.index
        return [launch for record in records if record.step == wanted and (launch := launch_of(record))]


def _facts(finding: Finding) -> list[list[str]]:
    """Label and text, as in the terminal's report."""
    fault = finding.fault
    facts = [["kind", fault.kind], ["step", f"{fault.step.index if fault.step.index is not None else 'before the first'} {fault.step.kind}"]]  # fmt: skip
    for label, call in (("origin", fault.origin), ("report", fault.report)):
        code = "" if call.code is None else f" = {call.code}"
        place = f" at {call.file}:{call.line}" if call.file else ""
        facts.append([label, f"{call.call}{code}{place} {call.text}".strip()])
    if fault.node:
        node = fault.node
        facts.append(["node", f"{node.index}: {node.op} {node.name} {node.type} {list(node.shape)}"])
    facts.append(["seen", f"{finding.times} of {finding.of} runs"])
    for name, value in fault.evidence.items():
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            facts.append([name.replace("_", " "), str(value)])
    return facts


def _steps(case: Case) -> list[dict[str, Any]]:
    """What the lanes show of each step: its kind, tokens by slot, and where the state it sets came from."""
    made: dict[str, int] = {}
    shown: list[dict[str, Any]] = []
    taken_of: dict[str, int] = {}
    for index, step in enumerate(case.steps):
        entry: dict[str, Any] = {"kind": step.kind}
        if isinstance(step, Decode):
            entry["tokens"] = step.tokens_by_slot()
        for name in ("slot", "into"):
            if isinstance(getattr(step, name, None), int):
                entry[name] = getattr(step, name)
        state = getattr(step, "name", None)
        if isinstance(step, Restore | Load):
            entry["from"] = made.get(step.name)
            entry.setdefault("slot", taken_of.get(step.name))
        elif state is not None:
            made[state] = index
            taken_of[state] = entry["slot"]
        shown.append(entry)
    return shown


def _launches(launches: Iterable[Launch]) -> dict[str, Any]:
    """Names once, then a row of numbers a launch."""
    names: dict[str, int] = {}
    rows = []
    for launch in launches:
        name = launch.demangled or kernel_name(launch.kernel)
        number = names.setdefault(name, len(names))
        rows.append([launch.number, number, *launch.grid, *launch.block, launch.shared, launch.code])
    return {"names": list(names), "rows": rows}


def _limits(launch: Launch) -> list[list[Any]]:
    """Name, what was launched, what is allowed (the least of the limits) and whose limit that is."""
    found = []
    for name, used, limiting in _LIMITS:
        known = {limit: launch.attributes[limit] for limit in limiting if launch.attributes.get(limit)}
        if known:
            least = min(known, key=lambda limit: known[limit])
            found.append(
                [name, used(launch), known[least], "the device" if least.startswith("device_") else "the kernel"]
            )
    return found
