"""Which rows, switches, controls and builds a fault needs: a table of runs that differ from the case in one thing each.

confirm   how often of n, in fresh children
rows      the failing decode with 1 to 16 tokens of one slot
switches  of the build and the context, each alone
controls  the CPU, one slot, an f16 cache, another cache type, tokens decoded anew instead of a restore
builds    the same case on others, in the order given
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import structs

from isolate.case import Case, Decode, Load, Restore, Run
from isolate.errors import IsolateError
from isolate.fault import Fault, Signature
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find
from isolate.search import history
from isolate.search.pin import Job, Settings
from isolate.search.without import counting, on_one_slot, slots, valid, with_settings, with_steps

ROWS = range(1, 17)
#: the line in `file:line: expression`
_LINE = re.compile(r":\d+:")
Group = Literal["rows", "switches", "controls", "builds"]


@dataclass(frozen=True)
class Treatment:
    """One thing that is different."""

    group: Group
    name: str
    case: Case
    settings: Settings
    #: set in the child's environment, for the command that replays it
    environment: dict[str, str] = field(default_factory=dict)
    #: switches of `isolate run` that replay it
    switches: tuple[str, ...] = ()
    #: what the case has and this has not, where the name does not say it
    without: str = ""


@dataclass(frozen=True)
class Cell:
    """A treatment and what came of it: the fault, or why it was not run."""

    treatment: Treatment
    fault: Fault | None = None
    why_not: str = ""

    def outcome(self, wanted: Signature) -> str:
        """`fault` for the same one, `other` for another, `pass`, or `not run`."""
        if self.why_not:
            return "not run"
        if self.fault is None:
            return "pass"
        return "fault" if alike(self.fault.signature, wanted) else "other"


@dataclass(frozen=True)
class Triage:
    """The fault of the case itself, and the table."""

    fault: Fault
    times: int
    of: int
    cells: tuple[Cell, ...]


def alike(one: Signature, other: Signature) -> bool:
    """The same fault as far as another treatment can show it: a kernel's variant and an assertion's line may differ."""
    if one == other:
        return True
    if one.kind == "cuda":
        same = one.where.partition("<")[0] == other.where.partition("<")[0]
    else:
        same = _LINE.sub(":", one.where) == _LINE.sub(":", other.where)
    return same and (one.kind, one.code, one.step) == (other.kind, other.code, other.step)


def triage(job: Job, settings: Settings, confirm: int, builds: Sequence[str], jobs: int) -> Triage:
    """Confirm the fault, then run every treatment. IsolateError where the case has no fault, or is not usable."""
    seen: list[Fault] = []
    with Supervisor(settings.build, settings.include, settings.target, settings.timeout, spare=True) as children:
        for _ in range(confirm):
            children.fresh()
            fault = children.run(job.case, settings.check, job.folder).fault
            if fault is not None and (not seen or fault.signature == seen[0].signature):
                seen.append(fault)
    if not seen:
        raise IsolateError(f"nothing to triage: no fault in {confirm} runs in fresh children; run: {job.replay}")
    case = structs.replace(job.case, steps=_until(job.case, seen[0]))
    groups: dict[Any, list[Treatment]] = {}
    treatments = list(_treatments(case, seen[0], settings, builds))
    for treatment in treatments:
        groups.setdefault(_children_key(treatment.settings), []).append(treatment)
    cells: dict[int, Cell] = {}

    def run(group: list[Treatment]) -> None:
        for treatment, cell in zip(group, _run(group, job), strict=True):
            cells[id(treatment)] = cell

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, groups.values()))
    return Triage(seen[0], len(seen), confirm, tuple(cells[id(treatment)] for treatment in treatments))


def _children_key(settings: Settings) -> tuple[Any, ...]:
    """Treatments that one warm child can run."""
    return (
        settings.build,
        settings.target.name,
        settings.target.modes,
        tuple(sorted(settings.target.environment.items())),
    )


def _run(group: list[Treatment], job: Job) -> Iterator[Cell]:
    one = group[0].settings
    with Supervisor(one.build, one.include, one.target, one.timeout, spare=len(group) > 2) as children:
        for treatment in group:
            try:
                yield Cell(treatment, children.run(treatment.case, one.check, job.folder).fault)
            except IsolateError as error:
                yield Cell(treatment, None, error.message)


def _until(case: Case, fault: Fault) -> list[Any]:
    return case.steps if fault.step.index is None else case.steps[: fault.step.index + 1]


def _treatments(case: Case, fault: Fault, settings: Settings, builds: Sequence[str]) -> Iterator[Treatment]:
    yield from _rows(case, settings)
    yield from _switches(case, settings)
    yield from _controls(case, settings)
    for build in builds:
        # The target belongs to a build: its stand-ins are those that this build needs.
        try:
            target = find(settings.target.name, build, None)
        except IsolateError:
            target = settings.target
        yield Treatment("builds", build, case, replace(settings, build=build, include=None, target=target))


def _rows(case: Case, settings: Settings) -> Iterator[Treatment]:
    last = case.steps[-1]
    if not isinstance(last, Decode) or not last.batch:
        return
    for count in ROWS:
        run = Run(last.batch[0].slot, counting(count), at=last.batch[0].at)
        changed = with_steps(case, [*case.steps[:-1], structs.replace(last, batch=[run])])
        if changed is not None:
            yield Treatment("rows", str(count), changed, settings)


#: Environment variables of ggml and llama.cpp that turn something off, and what.
_OFF = {
    "CUDA graphs": ("GGML_CUDA_DISABLE_GRAPHS", "1"),
    "fusion": ("GGML_CUDA_DISABLE_FUSION", "1"),
    "PDL": ("GGML_CUDA_PDL", "0"),
    "pinned memory": ("GGML_CUDA_NO_PINNED", "1"),
}


def _switches(case: Case, settings: Settings) -> Iterator[Treatment]:
    yield _with_environment("graph reuse off", "LLAMA_GRAPH_REUSE_DISABLE", "1", case, settings)
    if settings.target.hooked:
        for name, (variable, value) in _OFF.items():
            yield _with_environment(f"{name} off", variable, value, case, settings)
        target = settings.target.with_modes("no-vmm")
        yield Treatment(
            "switches", "virtual memory pool off", case, replace(settings, target=target), switches=("--no-vmm",)
        )
    settable: dict[str, tuple[Any, ...]] = {
        "flash_attn_type": ("enabled", "disabled"),
        "kv_unified": (True, False),
        "swa_full": (True, False),
    }
    for name, possible in settable.items():
        own = getattr(case.context, name)
        for setting in possible:
            changed = with_settings(case, {name: setting})
            if own != setting and changed is not None:
                without = f"{name} {str(own).lower()}"
                yield Treatment("switches", f"{name} {str(setting).lower()}", changed, settings, without=without)


def _with_environment(name: str, variable: str, value: str, case: Case, settings: Settings) -> Treatment:
    target = replace(settings.target, environment={**settings.target.environment, variable: value})
    return Treatment("switches", name, case, replace(settings, target=target), {variable: value})


def _controls(case: Case, settings: Settings) -> Iterator[Treatment]:
    if settings.target.hooked:
        yield Treatment(
            "controls",
            "on the CPU",
            case,
            replace(settings, target=find("cpu")),
            switches=("--target", "cpu"),
            without="the GPU",
        )
    for kind in ("f16", "q8_0", "q4_0"):
        changed = with_settings(case, {"type_k": kind, "type_v": kind})
        if (case.context.type_k, case.context.type_v) != (kind, kind) and changed is not None:
            own = f"a {'/'.join(dict.fromkeys((case.context.type_k, case.context.type_v)))} cache"
            yield Treatment("controls", f"{kind} cache", changed, settings, without=own)
    if len(slots(case)) > 1:
        one = on_one_slot(case, slots(case)[0])
        if one is not None:
            yield Treatment("controls", "one slot", one, settings, without="a second slot")
    if case.model.type is not msgspec.UNSET:
        plain = valid(structs.replace(case, model=structs.replace(case.model, type=msgspec.UNSET)))
        if plain is not None:
            yield Treatment("controls", "F32 weights", plain, settings, without=f"{case.model.type} weights")
    straight = _straight(case)
    if straight is not None:
        yield Treatment("controls", "decoded anew, not restored", straight, settings, without="a restored state")


def _straight(case: Case) -> Case | None:
    """The case with every restore and load that can be replaced by its tokens."""
    changed = None
    index = 0
    while index < len((changed or case).steps):
        now = changed or case
        if isinstance(now.steps[index], Restore | Load):
            for steps in history.straight(now, index):
                changed = with_steps(now, steps) or changed
                break
        index += 1
    return changed


def needs(found: Triage) -> tuple[list[str], list[str]]:
    """What the fault needs (it is gone without) and what it does not (it is there all the same), in words."""
    need: list[str] = []
    needless: list[str] = []
    wanted = found.fault.signature
    rows = [
        int(cell.treatment.name)
        for cell in found.cells
        if cell.treatment.group == "rows" and cell.outcome(wanted) == "fault"
    ]
    if rows and len(rows) < len(ROWS):
        need.append(f"{_ranges(rows)} rows in the decode")
    elif rows:
        needless.append("a certain number of rows")
    for cell in found.cells:
        if cell.treatment.group not in ("switches", "controls"):
            continue
        outcome = cell.outcome(wanted)
        what = cell.treatment.without or cell.treatment.name.removesuffix(" off")
        if outcome == "pass":
            need.append(what)
        elif outcome == "fault":
            needless.append(what)
    # Where some values of a setting have the fault and others have not, the table alone says which.
    both = set(need) & set(needless)
    return [n for n in dict.fromkeys(need) if n not in both], [n for n in dict.fromkeys(needless) if n not in both]


def sentence(found: Triage) -> str:
    """What it needs and what not, in one sentence."""
    need, needless = needs(found)
    parts = [f"needs {_listed(need)}"] if need else []
    parts += [f"does not need {_listed(needless, 'or')}"] if needless else []
    parts = parts or ["nothing that was changed decides over it"]
    first = [
        cell.treatment.name
        for cell in found.cells
        if cell.treatment.group == "builds" and cell.outcome(found.fault.signature) == "fault"
    ]
    builds = f"; of the other builds the first that fails is {first[0]}" if first else ""
    return f"The fault {' and '.join(parts)}{builds}."


def _listed(words: Sequence[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _ranges(numbers: Sequence[int]) -> str:
    """`6 to 8`, or `1, 3 to 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
