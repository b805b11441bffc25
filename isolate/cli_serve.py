"""The commands about servers: tables of treatments, recordings of a real one, what a log tells."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import click
from rich.console import Console

from isolate import case as cases_of
from isolate.errors import IsolateError
from isolate.options import jobs_option, json_option, replay_line, writable
from isolate.replay.target import find as find_target
from isolate.report import json as report_json
from isolate.report import matrix as report_matrix
from isolate.report import recorded as report_recorded
from isolate.report.progress import watched
from isolate.search import pin
from isolate.serve import log as server_log
from isolate.serve import record as recorder
from isolate.serve import table as tables
from isolate.serve.matrix import Kept, Place, follow, run
from isolate.terminal import say
from isolate.trace import gpus


@click.command()
@click.argument(
    "sources", nargs=-1, required=True, metavar="TABLE.toml|CASE...", type=click.Path(path_type=Path)
)  # fmt: skip
@click.option("--build", envvar="ISOLATE_BUILD", metavar="DIR", help="Folder with a libllama.")
@click.option("--include", metavar="DIR", help="Folder of the llama.h that the build was made from.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="For a table: cpu (default), cuda, dry:GPU; repeatable.",
)
@click.option("--gpus", "chosen", metavar="all|NAME,...", help="Simulated GPUs [default for cases: all].")
@jobs_option(2)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="For a table: where cases of findings go [default: TABLE-cases].",
)
@click.option("--resume", is_flag=True, help="Run only what the last run into the same --out did not come to.")
@click.option("--markdown", metavar="FILE", callback=writable, help="Also write the table as Markdown.")
@click.option("--html", metavar="FILE", callback=writable, help="Also write the table as a page.")
@json_option
def matrix(
    sources: tuple[Path, ...], build: str | None, include: str | None, targets: tuple[str, ...], chosen: str | None,
    jobs: int, out: Path | None, resume: bool, markdown: str | None, html: str | None, json_path: str | None,
) -> None:  # fmt: skip
    """Which treatments fail, and what do the failures have in common?

    TABLE.toml: a server's settings row by row, see `cases/parallel-checkpoints.toml`. CASE...: each on each simulated GPU.
    """
    names = gpus.names() if chosen == "all" or (chosen is None and not targets) else (chosen or "").split(",")
    dry = [f"dry:{name.strip()}" for name in names if name.strip()]
    settings = pin.Settings(find_target("cpu"), build, include)
    switches = {"--build": build, "--include": include}
    kept = None
    if any(source.suffix == ".toml" for source in sources):
        if len(sources) > 1:
            raise IsolateError("a table is run alone: give one TABLE.toml, or cases")
        if chosen is None:
            dry = []
        (source,) = sources
        out = out or Path(f"{source.stem}-cases")
        table = tables.read(source)
        kept = _folder(out, resume)
        places = _treatments(
            table, source.parent, out, [*(targets or ([] if dry else ["cpu"])), *dry], settings, switches
        )
    else:
        for option, given in (("--out", out), ("--resume", resume), ("--markdown", markdown), ("--html", html)):
            if given:
                raise IsolateError(f"{option} goes with a TABLE.toml, not with cases")
        places = _cases(sources, [*targets, *dry], settings, switches)
    cells = list(watched(run(places, settings, jobs, kept), [f"{place.row} on {place.column}" for place in places]))
    if json_path != "-":
        shown = report_matrix.by_target(cells) if kept is None else report_matrix.by_treatment(cells)
        Console(width=None if sys.stdout.isatty() else 200).print(shown)
        for line in ([follow(cells)] if kept is not None and follow(cells) else []) + list(report_matrix.below(cells)):
            say(line)
    for path, text in ((markdown, report_matrix.markdown), (html, report_matrix.html)):
        if path:
            _write(Path(path), text(cells))
    if json_path:
        report_json.write(report_matrix.data(cells), json_path)
    ran = [cell.result for cell in cells if isinstance(cell.result, pin.Result)]
    if not ran:
        sys.exit(2)
    sys.exit(1 if any(result.findings for result in ran) else 0)


def _folder(out: Path, resume: bool) -> Kept:
    """The folder for cases and results, made; what an earlier run found is kept only to resume."""
    path = out / "results.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise IsolateError(f"{out}: cannot be written: {error.strerror}") from None
    return Kept(path)


def _treatments(
    table: list[tables.Treatment], folder: Path, out: Path, targets: list[str], settings: pin.Settings,
    switches: dict[str, str | None],
) -> list[Place]:  # fmt: skip
    """The cells of a table that is in `folder`; each row's case is written to `out`, so that its replay line works."""
    found = {name: find_target(name, settings.build, settings.include) for name in dict.fromkeys(targets)}
    places = []
    for treatment in table:
        path = out / f"{_file_name(treatment.name)}.json"
        try:
            treatment.case.write(path)
        except OSError as error:
            raise IsolateError(f"{path}: cannot be written: {error.strerror}") from None
        for name, target in found.items():
            line = replay_line(path, {**switches, "--target": name if name != "cpu" else None}, ())
            job = pin.Job(treatment.case, folder, line)
            places.append(Place(treatment.name, name, job, target, treatment.factors, str(path)))
    return places


def _cases(
    sources: tuple[Path, ...], targets: list[str], settings: pin.Settings, switches: dict[str, str | None]
) -> list[Place]:
    cases = [(path, cases_of.read(path)) for path in sources]
    found = {name: find_target(name, settings.build, settings.include) for name in dict.fromkeys(targets)}
    places = []
    for path, case in cases:
        for name, target in found.items():
            line = replay_line(path, {**switches, "--target": name}, ())
            places.append(Place(path.stem, name.removeprefix("dry:"), pin.Job(case, path.parent, line), target))
    return places


def _file_name(row: str) -> str:
    """A file name for a row: its words, and what makes it unlike others whose words are the same."""
    words = re.sub(r"[^\w.-]+", "-", row).strip("-.")[:80]
    return f"{words}-{hashlib.sha256(row.encode()).hexdigest()[:6]}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise IsolateError(f"{path}: cannot be written: {error.strerror}") from None


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
@click.option(
    "--out", required=True, metavar="CASE", type=click.Path(path_type=Path), callback=writable,
    help="Where to write what it called.",
)  # fmt: skip
@click.option("--target", default="cpu", metavar="dry:GPU", help="Simulate this GPU below a program made for CUDA.")
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=writable,
    help="Also trace its CUDA calls into FILE.",
)
@click.option("--build", metavar="DIR", help="The libllama it is linked with, where that cannot be told.")
def record(command: tuple[str, ...], out: Path, target: str, trace: Path | None, build: str | None) -> None:
    """What did that real server call before it died?

    Starts COMMAND (a llama-server, or any program that is linked with a shared libllama) with a recorder in front of
    libllama, and writes what was called as a case when it has ended. Exit code 1: it died of a signal, or a CUDA call failed.
    """
    made = recorder.record(command, target, build, trace)
    try:
        made.case.write(out)
    except OSError as error:
        raise IsolateError(f"{out}: cannot be written: {error.strerror}") from None
    if out.stat().st_size > cases_of.MAX_FILE_BYTES:
        say(f"note: {out} is larger than `isolate run` reads: record a shorter run", err=True)
    switches = {"--build": build or made.build, "--target": made.target if made.target != "cpu" else None}
    for line in report_recorded.text(made, out, replay_line(out, switches, ())):
        say(line, err=True)
    sys.exit(1 if made.fault or made.status > 128 else 0)


@click.command("import-log")
@click.argument("log", metavar="LOG", type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="CASE", type=click.Path(path_type=Path), help="Where to write the case [default: LOG.json]."
)
def import_log(log: Path, out: Path | None) -> None:
    """What does a server's log alone tell?

    Makes a case of it and lists what had to be assumed. A log written with -lv 4 or more tells most.
    """
    case, assumed = server_log.case_of(server_log.read(log))
    out = out or Path(f"{log.name}.json")
    try:
        case.write(out)
    except OSError as error:
        raise IsolateError(f"{out}: cannot be written: {error.strerror}") from None
    say(f"written {out}  {len(case.steps)} steps; assumed:")
    for line in assumed:
        say(f"  {line}")
    say(f"  replay {replay_line(out, {}, ())}")


def add_to(group: click.Group) -> None:
    """The commands of this module become commands of `group`."""
    for command in (matrix, record, import_log):
        group.add_command(command)
