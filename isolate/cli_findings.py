"""The commands about a fault that was found: shrink it, see what it needs, hand it over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from isolate import case as cases_of
from isolate.case import Check
from isolate.fault import Finding
from isolate.options import (
    build_options,
    check_option,
    jobs_option,
    json_option,
    model_option,
    replay_line,
    run_switches,
    timeout_option,
)
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import find as find_target
from isolate.report import cpp, findings, html, index, issue, python
from isolate.report import json as report_json
from isolate.report import minimized as report_minimized
from isolate.report import pytest as report_pytest
from isolate.report import text as report_text
from isolate.report import triage as report_triage
from isolate.search import minimize as minimizer
from isolate.search import pin
from isolate.search import triage as triager
from isolate.terminal import say


class Budget(click.ParamType[dict[str, float]]):
    """`80` replays, `30s` or `5m` of time, or both with a comma between."""

    name = "budget"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in value.split(","):
            number, unit = (part[:-1], part[-1]) if part[-1:] in ("s", "m", "h") else (part, "")
            if not number.isascii() or not number.isdigit() or int(number) < 1:
                self.fail(f"{value!r} is neither a number of replays (80) nor a time (30s, 5m, 1h)", parameter, context)
            found["seconds" if unit else "replays"] = int(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]
        return found


@click.command()
@click.argument("path", metavar="CASE", type=click.Path(path_type=Path))
@build_options
@model_option
@check_option
@click.option(
    "--budget", type=Budget(), metavar="N|TIME", help="Most replays (80), most time (30s, 5m), or both (80,5m)."
)
@jobs_option(1)
@click.option(
    "--confirm",
    default=3,
    show_default=True,
    metavar="N",
    type=click.IntRange(1, 100),
    help="Runs in fresh children before and after.",
)
@timeout_option
@click.option(
    "--resume",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep each verdict in FILE, and take up again from what it holds.",
)
@click.option(
    "--out",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Where to write what is left [default: CASE.min.json].",
)
@json_option
def minimize(
    path: Path, build: str | None, include: str | None, target: str, model: str | None, check: tuple[Check, ...],
    budget: dict[str, float] | None, jobs: int, confirm: int, timeout: float, resume: Path | None, out: Path | None,
    json_path: str | None,
) -> None:  # fmt: skip
    """What is it really about: the smallest case that still has the fault of CASE.

    Exit code 1: there is a fault and this is what is left. 2: CASE has none, or something is not usable.
    """
    case = cases_of.read(path)
    if model is not None:
        case = cases_of.with_model(case, model)
    out = out or path.with_name(f"{path.name.removesuffix('.json')}.min.json")
    settings = pin.Settings(find_target(target, build, include), build, include, check, timeout=timeout)
    # the case that is written has the model and the checks in it
    switches = run_switches(build, include, target, timeout)
    given = run_switches(build, include, target, timeout, model, check)
    allowed = budget or {}
    replays = int(allowed["replays"]) if "replays" in allowed else None
    limits = minimizer.Limits(replays, allowed.get("seconds"), jobs, confirm, resume)
    job = pin.Job(case, path.parent, replay_line(path, given, ()))
    result = minimizer.minimize(job, settings, limits)
    cases_of.write_beside(result.case, out, path.parent)
    replay = replay_line(out, switches, ())
    others = []
    for number, (other, fault) in enumerate(result.others, 1):
        place = out.with_name(f"{out.name.removesuffix('.json')}.other-{number}.json")
        cases_of.write_beside(other, place, path.parent)
        others.append((place, fault, replay_line(place, switches, ())))
    if json_path != "-":
        said = [(place, report_text.headline(fault)) for place, fault, _ in others]
        say(report_minimized.text(case, result, replay, said))
    if json_path:
        findings = [minimizer.finding(result, replay)]
        findings += [Finding(other.as_json(), fault, 1, 1, line) for (other, _), (_, fault, line) in zip(result.others, others, strict=True)]  # fmt: skip
        document = report_json.document(findings, result.replays)
        report_json.write({**document, "minimized": report_minimized.data(result)}, json_path)
    sys.exit(1)


@click.command()
@click.argument("path", metavar="FINDING", type=click.Path(path_type=Path))
@click.option("--as", "form", required=True, type=click.Choice(["cpp", "python", "pytest", "issue", "html"]))
@click.option(
    "--number",
    default=0,
    show_default=True,
    metavar="N",
    type=click.IntRange(0),
    help="Which finding of the file, from 0.",
)
@build_options
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="For html: a trace that `isolate run --trace` kept of it.",
)
@click.option("--out", metavar="PATH", help="Where to write it [default: standard output].")
def export(
    path: Path, form: str, number: int, build: str | None, include: str | None, target: str, trace: Path | None,
    out: str | None,
) -> None:  # fmt: skip
    """Something to hand to a developer, from a finding that --json FILE of another command wrote.

    `issue` asks the build (--build) for its version. The build that a finding's file names is never loaded by itself.
    """
    finding, case = findings.one(path, number)
    if form == "issue" and build is None and "--build" in finding.replay.split():
        say("the version is not told: pass --build, the folder of the build that the finding is of", err=True)
        text = issue.text(finding, case)
    elif form == "issue":
        with Supervisor(build, include, find_target(target, build, include)) as supervisor:
            text = issue.text(finding, case, supervisor.describe())
    elif form == "html":
        text = html.text(finding, case, html.of_step(trace, finding.fault) if trace else ())
    else:
        writer = {"cpp": cpp.text, "python": python.text, "pytest": report_pytest.text}[form]
        text = writer(finding, case)
    if out in (None, "-"):
        click.echo(text, nl=False)
        return
    report_json.write_text(text, str(out))


@click.command()
@click.argument("path", metavar="CASE", type=click.Path(path_type=Path))
@build_options
@model_option
@check_option
@click.option(
    "--confirm", default=3, show_default=True, metavar="N", type=click.IntRange(1, 1000), help="Runs in fresh children."
)
@click.option("--against", multiple=True, metavar="DIR", help="Another build to run it on; repeatable, oldest first.")
@jobs_option(2)
@timeout_option
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write the case of each run there, and print the command that replays it.",
)
@json_option
def triage(
    path: Path, build: str | None, include: str | None, target: str, model: str | None, check: tuple[Check, ...],
    confirm: int, against: tuple[str, ...], jobs: int, timeout: float, out: Path | None, json_path: str | None,
) -> None:  # fmt: skip
    """With which rows, switches, builds and controls does it fail?

    Exit code 1: there is a fault and this is what it needs. 2: CASE has none, or something is not usable.
    """
    case = cases_of.read(path)
    if model is not None:
        case = cases_of.with_model(case, model)
    settings = pin.Settings(find_target(target, build, include), build, include, check, timeout=timeout)
    switches = run_switches(build, include, target, timeout, model, check)
    line = replay_line(path, switches, ())
    found = triager.triage(pin.Job(case, path.parent, line), settings, confirm, against, jobs)
    replays: dict[int, str] = {}
    if out is not None:
        report_json.make_folder(out)
        for number, cell in enumerate(found.cells):
            place = out / f"{number:02}-{cell.treatment.group}.json"
            cases_of.write_beside(cell.treatment.case, place, path.parent)
            replays[number] = report_triage.replay(cell, str(place), {**switches, "--model": None})
    if json_path != "-":
        say(report_triage.text(found, replays))
        say(f"  replay       {line}")
    if json_path:
        finding = Finding(case.as_json(), found.fault, found.times, found.of, line)
        document = report_json.document([finding], confirm + len(found.cells))
        report_json.write({**document, "triage": report_triage.data(found, replays)}, json_path)
    sys.exit(1)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Where to write the pages [default: DIR].")
def report(folder: Path, out: Path | None) -> None:
    """An index page over a folder of findings that --json FILE of other commands wrote, and a page for each."""
    out = out or folder
    if out != folder:
        report_json.make_folder(out)
    count = index.write(folder, out)
    say(f"{out / 'index.html'}: {count} finding{'s' * (count != 1)}")


def add_to(group: click.Group) -> None:
    """Make these commands of `isolate`."""
    for command in (minimize, triage, export, report):
        group.add_command(command)
