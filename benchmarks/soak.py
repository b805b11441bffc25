"""A campaign for as many steps as asked for: does it stay as small as it was?

    python benchmarks/soak.py [--steps 2000000] [--jobs 16] [--build DIR] [--out DIR] [--every 60] [--csv FILE]

Resident memory, open files and children of the parent and of its processes are read every so many seconds, when a share
ends. Last comes a short table; the exit code is 1 where memory or files grew after the first quarter, or something is left.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from isolate.cli_fuzz import space_of
from isolate.options import replay_line, run_switches
from isolate.report import json as report_json
from isolate.report.campaign import line
from isolate.search.campaign import Campaign
from isolate.search.executors import processes
from isolate.search.known import shipped
from isolate.search.shard import Found, Plan

#: What may be gained between the first and the last look, of what there was, and besides in MiB: the allocator is no clock.
TENTH, SLACK = 1.1, 24.0


class Enough(Exception):
    """As many steps were run as were asked for."""


@dataclass(frozen=True)
class Look:
    """What the processes hold at one time. Memory in MiB."""

    seconds: float
    cases: int
    steps: int
    parent: float
    parent_files: int
    #: of the processes that run shares: the largest
    runner: float
    runner_files: int
    runners: int
    #: of the children that the library is in: the largest
    child: float
    children: int
    zombies: int


def processes_below(parent: int) -> dict[int, list[tuple[int, str]]]:
    """Children by parent, with their states, of all processes below one."""
    below: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        below.setdefault(int(fields_[1]), []).append((int(stat.parent.name), fields_[0]))
    found, waiting = {}, [parent]
    while waiting:
        process = waiting.pop()
        found[process] = below.get(process, [])
        waiting += [child for child, _ in found[process]]
    return found


def resident(process: int) -> float:
    """Resident memory in MiB; 0 when the process has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(process: int) -> int:
    """Open descriptors; 0 when the process has ended."""
    try:
        return len(list(Path(f"/proc/{process}/fd").iterdir()))
    except OSError:
        return 0


def look(campaign: Campaign, started: float) -> Look:
    """What is held now."""
    parent = os.getpid()
    below = processes_below(parent)
    runners = [process for process, _ in below[parent] if "spawn_main" in words_of(process)]
    children = [child for runner in runners for child, _ in below[runner]]
    return Look(
        time.monotonic() - started, campaign.totals.cases_here, campaign.totals.steps_here,
        resident(parent), open_files(parent),
        max(map(resident, runners), default=0.0), max(map(open_files, runners), default=0), len(runners),
        max(map(resident, children), default=0.0), len(children),
        sum(state == "Z" for each in below.values() for _, state in each),
    )  # fmt: skip


def words_of(process: int) -> str:
    """A process's command line; "" when it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def shown(name: str, value: float) -> str:
    """A number as it stands in the table."""
    return f"{value:.0f}" if name == "seconds" or isinstance(value, int) else f"{value:.1f}"


def table(looks: list[Look]) -> str:
    """At most a dozen looks, evenly, as Markdown."""
    names = [field.name for field in fields(Look)]
    some = looks[:: max(1, len(looks) // 11)]
    rows = [*some, looks[-1]] if some[-1] is not looks[-1] else some
    lines = [f"| {' | '.join(names)} |", f"|{' --: |' * len(names)}"]
    lines += [f"| {' | '.join(map(shown, names, astuple(each)))} |" for each in rows]
    return "\n".join(lines)


def grown(looks: list[Look]) -> list[str]:
    """What was more in the last quarter of the time than in the second."""
    if len(looks) < 8:
        return []
    quarter = len(looks) // 4
    second, last = looks[quarter : 2 * quarter], looks[-quarter:]
    found = []
    for name in ("parent", "parent_files", "runner", "runner_files", "child"):
        before, after = (statistics.median(getattr(each, name) for each in part) for part in (second, last))
        memory = not name.endswith("files")
        if after > (before * TENTH + SLACK if memory else before + 8):
            found.append(f"{name}: {before:.0f} became {after:.0f}{' MiB' if memory else ''}")
    return found


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--build")
    parser.add_argument("--include")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="end after so long at the latest")
    parser.add_argument("--out", type=Path, help="the campaign's folder; one that exists goes on")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two looks")
    parser.add_argument("--csv", type=Path, help="write all looks there")
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        code = soak(asked, asked.out or Path(temporary) / "campaign")
    sys.exit(code)


def soak(asked: argparse.Namespace, folder: Path) -> int:
    """The exit code; the table is printed."""
    switches = run_switches(asked.build, asked.include, asked.target)

    def document(found: Found, path: Path) -> dict[str, object]:
        return report_json.document([found.finding(replay_line(path, switches, ()))], found.of)

    space = space_of((), None, None, asked.build, asked.include, asked.target)
    plan = Plan(asked.seed, space, asked.build, asked.include, asked.target)
    looks: list[Look] = []
    started = time.monotonic()
    campaign = Campaign(plan, folder, shipped(), document)

    def after_a_share() -> None:
        now = time.monotonic() - started
        if now - (looks[-1].seconds if looks else 0) >= asked.every:
            looks.append(look(campaign, started))
            print(f"{now:.0f} s: {line(campaign.totals)}", file=sys.stderr, flush=True)
        if campaign.totals.steps_here >= asked.steps:
            raise Enough

    with campaign, contextlib.suppress(Enough), processes(asked.jobs) as executor:
        seconds = None if asked.minutes is None else 60 * asked.minutes
        campaign.run(executor, asked.jobs, None, seconds, after_a_share)
    if not looks:
        print("it ended before the first look: use a smaller --every", file=sys.stderr)
        return 2
    time.sleep(1)
    after = processes_below(os.getpid())
    left = [process for process, _ in after[os.getpid()] if "resource_tracker" not in words_of(process)]
    print(table(looks))
    print(line(campaign.totals))
    journal = (folder / "journal.jsonl").stat().st_size
    print(
        f"journal {journal / 2**20:.1f} MiB; {len(left)} processes left; open files of the parent now {open_files(os.getpid())}"
    )
    more = grown(looks)
    for each in more:
        print(f"grew: {each}")
    if asked.csv:
        with asked.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Look))
            writer.writerows(map(astuple, looks))
    return 1 if more or left else 0


if __name__ == "__main__":
    main()
