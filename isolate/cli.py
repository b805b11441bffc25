"""The commands, each a few lines that call one function of a room below."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from isolate import case as cases_of
from isolate import cli_findings, cli_fuzz, cli_serve
from isolate.case import Case, Check
from isolate.errors import BuildError, DeviceError, IsolateError
from isolate.library.find import find_build
from isolate.options import (
    build_options,
    check_option,
    json_option,
    model_option,
    replay_line,
    run_switches,
    timeout_option,
    writable,
)
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import device_libraries
from isolate.replay.target import find as find_target
from isolate.report import doctor as report_doctor
from isolate.report import json as report_json
from isolate.report import kernels as report_kernels
from isolate.report import text as report_text
from isolate.report.progress import watched
from isolate.search import pin
from isolate.terminal import say
from isolate.trace import devices, gpus, launch
from isolate.trace import kernels as kernel_table
from isolate.trace.hooks import MODES
from isolate.trace.ring import Ring
from isolate.zoo import ZOO


def hook_mode(name: str) -> str:
    """The help of a switch for a mode of the launch hooks."""
    return f"{MODES[name][1][0].upper()}{MODES[name][1][1:]} (targets cuda and dry)."


class Address(click.ParamType[int]):
    """A number, also as 0x..."""

    name = "address"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return int(value, 0)
        except ValueError:
            self.fail(f"{value!r} is not an address such as 0x55d0c0", parameter, context)


def open_standard_files() -> None:
    """Let nothing else take the numbers of standard input, output and error where they were closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextmanager
def while_somebody_reads() -> Iterator[None]:
    """End as a program does whose output nobody reads any more: 128 and the number of SIGPIPE."""
    try:
        yield
    except BrokenPipeError:
        # what is still to be written goes nowhere, instead of failing again at the end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.exit(128 + signal.SIGPIPE)


class Commands(click.Group):
    """Ends with 130 when interrupted, with 2 when isolate itself fails: 1 would say that a fault was found."""

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with while_somebody_reads():
            return super().make_context(*arguments, **extra)

    def invoke(self, context: click.Context) -> Any:
        with while_somebody_reads():
            return super().invoke(context)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        open_standard_files()
        try:
            answer = super().main(args, prog_name, **{**extra, "standalone_mode": False})
        except click.Abort:
            say("interrupted", err=True)
            sys.exit(130)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            say(f"Error: isolate itself failed at {place}: {type(error).__name__}: {error!r}", err=True)
            sys.exit(2)
        sys.exit(answer if isinstance(answer, int) else 0)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="isolate")
def main() -> None:
    """Find the exact call that breaks when llama.cpp serves several slots from one KV cache."""


@main.command()
@build_options
@click.option(
    "--save-gpu",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write this machine's GPU as a file for dry:FILE.",
)
@json_option
def doctor(build: str | None, include: str | None, target: str, save_gpu: Path | None, json_path: str | None) -> None:
    """Can this build be driven, and what has it got?"""
    if save_gpu:
        gpus.save(devices.first_gpu(), save_gpu)
    with Supervisor(build, include, find_target(target, build, include)) as supervisor:
        found = supervisor.describe()
    here, found["driver"] = devices.gpus()
    found["gpus"] = msgspec.to_builtins(here)
    if json_path != "-":
        say(report_doctor.text(found))
    if json_path:
        report_json.write({"schema": "isolate.doctor/1", **found}, json_path)


@main.command()
@click.argument("cases", nargs=-1, required=True, metavar="CASE...", type=click.Path(path_type=Path))
@build_options
@model_option
@check_option
@click.option(
    "--deep",
    is_flag=True,
    help="After a fault, replay it to name the exact launch and the graph node that was computed.",
)
@click.option("--no-vmm", "modes", flag_value="no-vmm", multiple=True, help=hook_mode("no-vmm"))
@click.option("--fence", "modes", flag_value="fence", multiple=True, help=hook_mode("fence"))
@click.option("--fence-before", "modes", flag_value="fence-before", multiple=True, help=hook_mode("fence-before"))
@click.option("--poison", "modes", flag_value="poison", multiple=True, help=hook_mode("poison"))
@click.option(
    "--repeat",
    default=1,
    metavar="N",
    type=click.IntRange(1, 10000),
    help="Run each case N times, each in a new child.",
)
@timeout_option
@click.option("--trace", metavar="FILE", type=click.Path(path_type=Path), help="Keep the trace of the last run.")
@click.option(
    "--expected", is_flag=True, help="Exit 0 when each case ends as its own `expect` says, 1 when one does not."
)
@json_option
def run(
    cases: tuple[Path, ...], build: str | None, include: str | None, target: str, model: str | None, check: tuple[Check, ...],
    deep: bool, modes: tuple[str, ...], repeat: int, timeout: float, trace: Path | None, expected: bool,
    json_path: str | None,
) -> None:  # fmt: skip
    """Does it fail, where, why?

    Exit code 0: no fault. 1: a fault was found. 2: something is not usable, said in one sentence.
    """
    chosen = find_target(target, build, include)
    if modes and not chosen.hooked:
        raise DeviceError(
            f"--{modes[0]} is a mode of the launch hooks: it goes with --target cuda or dry:GPU, not {target}"
        )
    settings = pin.Settings(chosen.with_modes(*modes), build, include, check, deep, repeat, timeout, trace)
    switches = run_switches(build, include, target, timeout, model, check)
    # All are read before any is run: a bad file is said at once.
    jobs = []
    for path in cases:
        case = cases_of.read(path)
        if model is not None:
            case = cases_of.with_model(case, model)
        jobs.append(pin.Job(case, path.parent, replay_line(path, switches, (*modes, *(["deep"] if deep else [])))))
    quiet = json_path == "-"
    results: list[tuple[Path, Case, pin.Result, bool]] = []
    runs: list[dict[str, Any]] = []
    unusable = False
    for path, job, result in zip(cases, jobs, watched(pin.pin_all(jobs, settings), cases), strict=True):
        if isinstance(result, IsolateError):
            if len(jobs) == 1:
                raise IsolateError(f"{path}: {result.message}")
            say(f"not run {path}: {result.message}", err=quiet)
            runs.append({"case": str(path), "outcome": "not run", "why": result.message})
            # What another build could run says nothing against this one.
            unusable |= not (expected and isinstance(result, BuildError))
            continue
        right = pin.expected(job.case, result)
        results.append((path, job.case, result, right))
        runs.append(report_json.run(path, result))
        if not quiet:
            say(report_text.result(path, job.case, result, right if expected else None))
    if len(jobs) > 1 and not quiet:
        say(report_text.summary(results, len(jobs) - len(results), expected))
    findings = [finding for _, _, result, _ in results for finding in result.findings]
    if json_path:
        report_json.write(
            report_json.document(findings, sum(result.runs for _, _, result, _ in results), runs), json_path
        )
    if unusable:
        sys.exit(2)
    failed = not all(right for _, _, _, right in results) if expected else bool(findings)
    sys.exit(1 if failed else 0)


@main.command()
@click.argument("name", required=False)
@build_options
@click.option("--type", "quantization", default="F32", metavar="TYPE", show_default=True, help="F32, Q8_0, Q3_K, ...")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**31 - 1))
@click.option("--layers", metavar="N", type=click.IntRange(1), help="Its first layers alone, where all are alike.")
@click.option("--experts", metavar="N", type=click.IntRange(1), help="Its first experts alone.")
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
    layers: int | None,
    experts: int | None,
    out: Path | None,
) -> None:
    """Write a tiny model with random weights, or list those there are."""
    if name is None:
        say(report_text.zoo(ZOO))
        return
    if name not in ZOO:
        raise IsolateError(f"no zoo model is called {name!r}; there are {', '.join(sorted(ZOO))}")
    path = out or Path(f"{name}-{quantization}.gguf")
    with Supervisor(build, include, find_target(target, build, include)) as supervisor:
        made = supervisor.make_model(name, quantization.upper(), seed, path, layers, experts)
    say(f"{made['path']}: {made['bytes']} bytes")


@main.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Only this step of the case.")
@click.option("--kernel", metavar="TEXT", help="Only launches of kernels with this in their name.")
@click.option("--stream", metavar="ADDRESS", type=Address(), help="Only this stream.")
@click.option("--counts", is_flag=True, help="How often each kernel and call was made, and the host's time in it.")
@click.option("--chrome", metavar="FILE", callback=writable, help="Write the trace for Perfetto (Chrome's trace JSON).")
def trace(
    file: Path, step: int | None, kernel: str | None, stream: int | None, counts: bool, chrome: str | None
) -> None:
    """Look inside a trace that `isolate run --trace FILE` kept."""
    with Ring(file) as ring:
        records = list(launch.select(ring.records(), step, kernel, stream))
    if chrome:
        report_json.write(launch.chrome_trace(records), chrome)
    elif counts:
        for count in launch.counts(records):
            say(f"{count.calls:>8} calls  {count.failed:>4} failed  {count.host_ns / 1e6:>10.3f} ms  {count.name}")
    else:
        for record in records:
            say(launch.line(record))
    if not records:
        say("no record of the trace is of that step, kernel and stream", err=True)


@main.command()
@click.argument("folder", metavar="DIR", required=False)
@click.option("--gpu", metavar="NAME", help="Show the code this GPU would run, and the kernels that have none for it.")
@click.option("--kernel", metavar="TEXT", help="Only kernels with this in their name.")
@json_option
def kernels(folder: str | None, gpu: str | None, kernel: str | None, json_path: str | None) -> None:
    """What each kernel of a build allows, read from its fat binaries."""
    device = gpus.find(gpu) if gpu else None
    file = Path(folder) if folder and Path(folder).is_file() else None
    try:
        files = [file] if file else device_libraries(find_build(folder))
    except BuildError as error:
        # Here the folder is no option.
        raise BuildError(error.message.replace("pass --build", "name")) from error
    tables = [kernel_table.read(path) for path in files]
    if not any(table.kernels for table in tables):
        raise BuildError(
            f"{folder or 'the default build'} holds no CUDA kernels: name a CUDA build's folder, or its libggml-cuda.so"
        )
    found = list(report_kernels.chosen(tables, kernel))
    if json_path:
        report_json.write(report_kernels.data(found, device), json_path)
    if json_path != "-":
        for line in report_kernels.text(found, device):
            say(line)


cli_serve.add_to(main)
cli_findings.add_to(main)
cli_fuzz.add_to(main)
