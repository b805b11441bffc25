"""The command that looks for what nobody reported yet."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from isolate.errors import IsolateError
from isolate.options import build_options, json_option, replay_line, run_switches
from isolate.recipes import Memory
from isolate.report import json as report_json
from isolate.terminal import say

if TYPE_CHECKING:
    from isolate.fault import Finding
    from isolate.search.shard import Found

#: Minutes that a campaign takes when nothing else is said.
MINUTES = 10.0
#: Cases of one model and one set of settings, where launches are looked at.
LAUNCHED_SIZE = 8
#: Seconds that one step of a tiny model may take.
TIMEOUT = 30.0


@click.command()
@build_options
@click.option("--minutes", metavar="M", type=click.FloatRange(0.01), help=f"How long [default: {MINUTES:g}].")
@click.option(
    "--cases",
    metavar="N",
    type=click.IntRange(1),
    help="Until at least so many cases were run, in all runs together; they come in blocks of 40.",
)
@click.option(
    "--jobs", metavar="N", type=click.IntRange(1, 256), help="Children at once [default: one a processor, 2 on a GPU]."
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", type=click.IntRange(0), help="Same seed, same cases."
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The campaign's folder [default: fuzz-SEED]. One that exists goes on.",
)
@click.option("--model", "models", multiple=True, metavar="zoo:NAME[:TYPE]", help="Only this model; repeatable.")
@click.option("--memory", type=click.Choice(get_args(Memory)), help="Only models with this kind of memory.")
@click.option("--slots", metavar="N", type=click.IntRange(1, 16), help="So many slots.")
@click.option("--server", is_flag=True, help="Only what a server would do: random requests and options.")
@click.option("--hostile", is_flag=True, help="Overstep documented limits: only a clean error is right.")
@click.option("--plain", is_flag=True, help="Do not go on from cases that tried something new.")
@click.option(
    "--known",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Cases of known findings, or folders of them; repeatable.",
)
@click.option(
    "--database", metavar="DIR|redis://HOST", help="Hypothesis example database: what failed there is run first."
)
@click.option("--cluster", metavar="ADDRESS", help="Run on the workers of this Dask cluster.")
@click.option(
    "--timeout", default=TIMEOUT, show_default=True, metavar="SECONDS", type=click.FloatRange(0.1), help="For one step."
)
@json_option
def fuzz(
    build: str | None, include: str | None, target: str, minutes: float | None, cases: int | None, jobs: int | None, seed: int,
    out: Path | None, models: tuple[str, ...], memory: Memory | None, slots: int | None, server: bool, hostile: bool,
    plain: bool, known: tuple[Path, ...], database: str | None, cluster: str | None, timeout: float, json_path: str | None,
) -> None:  # fmt: skip
    """What nobody reported yet: random interleavings of slots and checkpoints, with every oracle on.

    Each new finding is confirmed in fresh children, reduced, and kept in the campaign's folder: its case as NAME.json,
    its document in findings/, for `isolate report`. The same command goes on where the folder ends.

    Exit code 1: something was found that is not known, now or in an earlier run of the folder. Known findings (--known,
    and the shipped ones) are counted only.
    """
    from isolate.report import campaign as report_campaign
    from isolate.search.campaign import Campaign
    from isolate.search.examples import Examples
    from isolate.search.executors import cluster as workers_of
    from isolate.search.executors import processes
    from isolate.search.known import read_all, shipped
    from isolate.search.shard import SIZE, Plan

    if hostile and server:
        raise IsolateError("--hostile and --server exclude each other: a server asks for nothing that it may not")
    space = space_of(models, memory, slots, build, include, target)
    # A fault of a launch shows in the first case of its model and settings, so that more of those are tried.
    size = LAUNCHED_SIZE if space.launches else SIZE
    # A worker of a cluster has a current folder of its own.
    where, headers = (None if path is None else str(Path(path).absolute()) for path in (build, include))
    plan = Plan(seed, space, where, headers, target, timeout, 1.0 if server else 0.3, hostile, not plain, size=size)
    seconds = None if cases is not None and minutes is None else 60 * (minutes or MINUTES)
    switches = run_switches(build, include, target)

    def finding(found: Found, path: Path) -> Finding:
        return found.finding(replay_line(path, switches, ()))

    def document(found: Found, path: Path) -> dict[str, Any]:
        return report_json.document([finding(found, path)], found.of)

    folder = out or Path(f"fuzz-{seed}")
    examples = Examples(database) if database else None
    with ExitStack() as stack:
        stack.enter_context(_ended_in_order())
        campaign = stack.enter_context(Campaign(plan, folder, [*shipped(), *read_all(known)], document, examples))
        if cluster:
            executor, at_once = stack.enter_context(workers_of(cluster))
        else:
            at_once = jobs or (2 if target == "cuda" else len(os.sched_getaffinity(0)))
            executor = stack.enter_context(processes(at_once))
        try:
            with report_campaign.told(campaign.totals, seconds) as told:
                campaign.run(executor, at_once, cases, seconds, told)
        finally:
            findings = [finding(found, campaign.folder.case(name)) for name, found in campaign.totals.found.items()]
            if json_path != "-":
                say(report_campaign.text(campaign, findings))
            if json_path:
                report_json.write(report_campaign.document(campaign, findings), json_path)
    sys.exit(1 if campaign.totals.found else 0)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the command as an error would, so that it says what it found; a second one ends it at once."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def space_of(
    models: tuple[str, ...],
    memory: Memory | None,
    slots: int | None,
    build: str | None,
    include: str | None,
    target: str,
) -> Any:
    """What cases may be made of, on this build. IsolateError where nothing is left."""
    from isolate.models import TYPES
    from isolate.replay.supervisor import Supervisor
    from isolate.replay.target import find as find_target
    from isolate.search.fuzz import Space

    named = [model.removeprefix("zoo:").partition(":") for model in models]
    if len({weights for _, _, weights in named}) > 1:
        raise IsolateError("--model: give all models the same type of weights")
    weights = named[0][2] if named and named[0][2] else None
    if weights is not None and weights.upper() not in TYPES:
        raise IsolateError(f"--model: no type of weights is called {weights!r}; there are {', '.join(TYPES)}")
    runs_on = find_target(target, build, include)
    with Supervisor(build, include, runs_on) as children:
        described = children.describe()
    kinds = described["kv_types"]
    assert isinstance(kinds, list)
    turbo = tuple(sorted(kind for kind in kinds if str(kind).startswith("turbo")))
    flags, calls = described["state_flags"], described["calls"]
    assert isinstance(flags, dict) and isinstance(calls, dict)
    space = Space(
        slots, memory, tuple(name for name, _, _ in named), weights, turbo, on_device="on_device" in flags,
        launches=runs_on.hooked, snapshots=calls["snapshots of recurrent state"], process=calls["decode by llama_process and llama_batch_ext"],
    )  # fmt: skip
    space.recipes()
    return space


def add_to(group: click.Group) -> None:
    """Make this a command of `isolate`."""
    group.add_command(fuzz)
