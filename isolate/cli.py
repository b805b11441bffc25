"""The commands, each a few lines that call one function of a room below."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from isolate import case as cases_of
from isolate.case import CHECKS, Check
from isolate.errors import IsolateError
from isolate.replay.supervisor import TIMEOUT, Supervisor
from isolate.replay.target import find as find_target
from isolate.report import json as report_json
from isolate.report import text as report_text
from isolate.report.progress import watched
from isolate.search import pin
from isolate.zoo import ZOO

Command = TypeVar("Command", bound=Callable[..., Any])


def build_options(command: Command) -> Command:
    """--build, --include and --target, which mean the same in every command."""
    for option in (
        click.option("--target", default="cpu", metavar="TARGET", help="What runs the graph: cpu."),
        click.option("--include", metavar="DIR", help="Folder of the llama.h that the build was made from."),
        click.option(
            "--build",
            envvar="ISOLATE_BUILD",
            metavar="DIR",
            help="Folder with a libllama [default: llama-cpp-python's].",
        ),
    ):
        command = option(command)
    return command


def json_option(command: Command) -> Command:
    """--json FILE, `-` for standard output."""
    return click.option(
        "--json", "json_path", metavar="FILE", help="Also write the result as JSON; - is standard output."
    )(command)


def checks(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Check, ...]:
    """`all`, or some of the oracles' names with commas between."""
    if value is None:
        return ()
    if value == "all":
        return CHECKS
    asked = [name.strip() for name in value.split(",")]
    for name in asked:
        if name not in CHECKS:
            raise click.BadParameter(f"{name!r} is not one of all, {', '.join(CHECKS)}")
    return tuple(name for name in CHECKS if name in asked)


def replay_line(path: Path, switches: dict[str, str | None]) -> str:
    """The command that runs a case again in the same way."""
    words = ["isolate", "run", str(path)]
    for switch, value in switches.items():
        if value and (switch, value) != ("--target", "cpu"):
            words += [switch, value]
    return shlex.join(words)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="isolate")
def main() -> None:
    """Find the exact call that breaks when llama.cpp serves several slots from one KV cache."""


@main.command()
@build_options
@json_option
def doctor(build: str | None, include: str | None, target: str, json_path: str | None) -> None:
    """Can this build be driven, and what has it got?"""
    from isolate.report import doctor as report_doctor
    from isolate.trace.devices import gpus

    with Supervisor(build, include, find_target(target)) as supervisor:
        found = supervisor.describe()
    found["gpus"], found["driver"] = gpus()
    if json_path != "-":
        click.echo(report_doctor.text(found))
    if json_path:
        report_json.write({"schema": "isolate.doctor/1", **found}, json_path)


@main.command()
@click.argument("cases", nargs=-1, required=True, metavar="CASE...", type=click.Path(path_type=Path))
@build_options
@click.option("--model", metavar="FILE|zoo:NAME[:TYPE]", help="Use this model instead of the case's.")
@click.option(
    "--check", callback=checks, metavar="all|NAME,...", help=f"Oracles to ask after each step: {', '.join(CHECKS)}."
)
@click.option("--deep", is_flag=True, help="After a fault, replay it node by node to name the graph node.")
@click.option(
    "--repeat",
    default=1,
    metavar="N",
    type=click.IntRange(1, 10000),
    help="Run each case N times, each in a new child.",
)
@click.option(
    "--timeout", default=TIMEOUT, metavar="SECONDS", type=click.FloatRange(0.1), help="For one step.", show_default=True
)
@click.option("--trace", metavar="FILE", type=click.Path(path_type=Path), help="Keep the trace of the last run.")
@click.option(
    "--expected", is_flag=True, help="Exit 0 when each case ends as its own `expect` says, 1 when one does not."
)
@json_option
def run(
    cases: tuple[Path, ...], build: str | None, include: str | None, target: str, model: str | None, check: tuple[Check, ...],
    deep: bool, repeat: int, timeout: float, trace: Path | None, expected: bool, json_path: str | None,
) -> None:  # fmt: skip
    """Does it fail, where, why?

    Exit code 0: no fault. 1: a fault was found. 2: something is not usable, said in one sentence.
    """
    settings = pin.Settings(find_target(target), build, include, check, deep, repeat, timeout, trace)
    switches = {
        "--build": build,
        "--include": include,
        "--target": target,
        "--model": model,
        "--check": ",".join(check),
    }
    # All are read before any is run: a bad file is said at once.
    loaded = []
    for path in cases:
        case = cases_of.read(path)
        if model is not None:
            case = cases_of.with_model(case, model)
        loaded.append((case, path.parent, replay_line(path, switches)))
    results = []
    for path, (case, _, _), result in zip(cases, loaded, watched(pin.pin_all(loaded, settings), cases), strict=True):
        results.append(result)
        if json_path != "-":
            click.echo(report_text.result(path, case, result, pin.expected(case, result) if expected else None))
    if json_path:
        findings = [finding for result in results for finding in result.findings]
        report_json.write(report_json.document(findings, sum(result.runs for result in results)), json_path)
    if expected:
        right = all(pin.expected(case, result) for (case, _, _), result in zip(loaded, results, strict=True))
        sys.exit(0 if right else 1)
    sys.exit(1 if any(result.findings for result in results) else 0)


@main.command()
@click.argument("name", required=False)
@build_options
@click.option("--type", "quantization", default="F32", metavar="TYPE", show_default=True, help="F32, Q8_0, Q3_K, ...")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**31 - 1))
@click.option(
    "--out", metavar="PATH", type=click.Path(path_type=Path), help="Where to write it [default: NAME-TYPE.gguf]."
)
def model(
    name: str | None,
    build: str | None,
    include: str | None,
    target: str,
    quantization: str,
    seed: int,
    out: Path | None,
) -> None:
    """Write a tiny model with random weights, or list those there are."""
    if name is None:
        click.echo(report_text.zoo(ZOO))
        return
    if name not in ZOO:
        raise IsolateError(f"no zoo model is called {name!r}; there are {', '.join(sorted(ZOO))}")
    path = out or Path(f"{name}-{quantization}.gguf")
    with Supervisor(build, include, find_target(target)) as supervisor:
        made = supervisor.make_model(name, quantization.upper(), seed, path)
    click.echo(f"{made['path']}: {made['bytes']} bytes")
