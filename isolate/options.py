"""What several commands share: options that mean the same in each, and the line that runs a case again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from isolate.case import CHECKS, Check
from isolate.errors import IsolateError
from isolate.replay.supervisor import TIMEOUT

Command = TypeVar("Command", bound=Callable[..., Any])


def build_options(command: Command) -> Command:
    """--build, --include and --target, which mean the same in every command."""
    for option in (
        click.option("--target", default="cpu", metavar="TARGET", help="What runs the graph: cpu, cuda, dry:GPU."),
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


Place = TypeVar("Place", str | None, Path | None)


def writable(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """A file that can be written, as far as that is seen before the work is done; `-` for standard output."""
    if value is None or value == "-":
        return value
    place = Path(value)
    if place.is_dir():
        raise IsolateError(f"{place}: cannot be written: it is a folder")
    if not place.parent.is_dir():
        raise IsolateError(f"{place}: cannot be written: there is no folder {place.parent}")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise IsolateError(f"{place}: cannot be written: permission denied")
    return value


def json_option(command: Command) -> Command:
    """--json FILE, `-` for standard output."""
    return click.option(
        "--json",
        "json_path",
        metavar="FILE",
        callback=writable,
        help="Also write the result as JSON; - is standard output.",
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


def model_option(command: Command) -> Command:
    """--model, which takes the place of a case's."""
    return click.option("--model", metavar="FILE|zoo:NAME[:TYPE]", help="Use this model instead of the case's.")(
        command
    )


def check_option(command: Command) -> Command:
    """--check, the oracles to ask."""
    help_ = f"Oracles to ask after each step: {', '.join(CHECKS)}."
    return click.option("--check", callback=checks, metavar="all|NAME,...", help=help_)(command)


def timeout_option(command: Command) -> Command:
    """--timeout, the seconds that one step may take."""
    seconds = click.FloatRange(0.1)
    return click.option(
        "--timeout",
        default=TIMEOUT,
        metavar="SECONDS",
        type=seconds,
        help="Without a library call in one step.",
        show_default=True,
    )(command)


def jobs_option(default: int) -> Callable[[Command], Command]:
    """--jobs N, the children that run at once."""
    return click.option(
        "--jobs", default=default, show_default=True, metavar="N", type=click.IntRange(1, 256), help="Children at once."
    )


def run_switches(
    build: str | None, include: str | None, target: str, timeout: float = TIMEOUT, model: str | None = None,
    check: tuple[Check, ...] = (),
) -> dict[str, str | None]:  # fmt: skip
    """The switches of `isolate run` that differ from what it does without them, for `replay_line`."""
    return {
        "--build": build,
        "--include": include,
        "--target": target if target != "cpu" else None,
        "--model": model,
        "--check": ",".join(check),
        "--timeout": f"{timeout:g}" if timeout != TIMEOUT else None,
    }


def replay_line(path: Path, switches: dict[str, str | None], flags: tuple[str, ...]) -> str:
    """The command that runs a case again in the same way."""
    words = ["isolate", "run", str(path)]
    for switch, value in switches.items():
        words += [switch, value] if value else []
    return shlex.join(words + [f"--{flag}" for flag in flags])
