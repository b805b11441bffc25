"""The launches of a case on a target, as lines: number, call, kernel, grid, block, dynamic shared memory, code."""

from __future__ import annotations

import re
from pathlib import Path

from isolate import case as cases
from isolate.case import Case
from isolate.fault import Fault
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import Target
from isolate.trace.record import Kind, LaunchDetail
from isolate.trace.ring import Ring

#: What nvcc puts into names of what is internal to a file: a digest of the file's path.
_INTERNAL = re.compile(r"_INTERNAL_[0-9a-f]{8}_")


def comparable(line: str) -> str:
    """The line without what differs between two builds of the same source."""
    return _INTERNAL.sub("_INTERNAL_", line)


def launches(case: Case | Path, build: Path, target: Target, trace: Path) -> tuple[list[str], Fault | None]:
    """Runs a case in a fresh child; the launches it made, oldest first, and its fault."""
    folder = Path()
    if isinstance(case, Path):
        folder, case = case.parent, cases.read(case)
    with Supervisor(str(build), None, target, trace=trace) as child:
        fault = child.run(case, folder=folder).fault
    ring = Ring(trace)
    try:
        records = [record for record in ring.records() if record.kind == Kind.LAUNCH]
    finally:
        ring.close()
    lines = []
    for record in records:
        assert isinstance(record.detail, LaunchDetail)
        grid = ",".join(str(number) for number in record.detail.grid)
        block = ",".join(str(number) for number in record.detail.block)
        name = f"{record.launch} {record.call} {record.name}"
        lines.append(f"{name} {grid} {block} {record.detail.shared} {record.code}")
    return lines, fault
