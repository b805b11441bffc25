"""A finding in the fields of llama.cpp's bug template, as Markdown."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from isolate.case import Case
from isolate.errors import IsolateError
from isolate.fault import Finding, Launch
from isolate.report import cpp
from isolate.report import text as report_text
from isolate.report.lowered import model_file
from isolate.search.needs import what_is_left


def text(finding: Finding, case: Case, build: dict[str, Any] | None = None) -> str:
    """The issue's text. `build` is what `isolate doctor` finds, where the build is at hand."""
    return "\n".join(_lines(finding, case, build)) + "\n"


def _lines(finding: Finding, case: Case, build: dict[str, Any] | None) -> Iterator[str]:
    fault = finding.fault
    yield f"# {_plain(str(fault.signature))}"
    yield from _section("Name and Version", _version(build))
    yield from _section("Operating systems", f"{platform.system()} {platform.machine()}")
    yield from _section("Which llama.cpp modules do you know to be affected?", "libllama (core library)")
    yield from _section(
        "GGML backends",
        "CUDA" if fault.kind == "cuda" or fault.launch else ", ".join((build or {}).get("backends", [])) or "not told",
    )
    yield from _section("Hardware", _hardware(finding, build))
    model, command = model_file(case)
    made = f": tiny, random weights, written by `{_code(command)}`" if command else ", the reporter's own"
    yield from _section("Models", f"`{_code(model)}`{made}")
    yield from _section("Problem description & steps to reproduce", f"{_plain(fault.explanation)}")
    yield f"{what_is_left(case)[:1].upper()}{what_is_left(case)[1:]}, seen {finding.times} of {finding.of} times. Replay:"
    yield from _fenced("console", f"$ {finding.replay}")
    yield "The case, whole:"
    data = msgspec.to_builtins(msgspec.structs.replace(case, about="", expect="pass"))
    yield from _fenced("json", json.dumps(data, indent=2))
    try:
        program = cpp.text(finding, case)
    except IsolateError as why:
        yield f"There is no stand-alone program: {_plain(why.message)}."
    else:
        yield "<details><summary>A stand-alone program against llama.h</summary>\n"
        yield from _fenced("cpp", program.rstrip())
        yield "\n</details>"
    yield from _section("First Bad Commit", "not searched; `git bisect run isolate run CASE --build DIR` does")
    if fault.launch:
        yield from _section("First bad launch", "")
        yield from _fenced("", _launch(fault.launch))
    yield from _section("Relevant log output", "")
    yield from _fenced("shell", "\n".join(fault.log) or report_text.headline(fault))


def _section(title: str, said: str) -> Iterator[str]:
    yield f"\n### {title}\n"
    if said:
        yield said


def _version(build: dict[str, Any] | None) -> str:
    if build is None:
        return "not told: the build was not at hand"
    versions = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in build["versions"].items() if value)
    return f"{_plain(versions)}; libraries {_plain(', '.join(Path(path).name for path in [build['build']['llama'], *build['build']['ggml']]))}"


def _hardware(finding: Finding, build: dict[str, Any] | None) -> str:
    words = finding.replay.split()
    target = words[words.index("--target") + 1] if "--target" in words[:-1] else "cpu"
    devices = ", ".join(str(device["description"]) for device in (build or {}).get("devices", []))
    simulated = " (simulated device, host code is real)" if target.startswith("dry:") else ""
    return _plain(f"target {target}{simulated}" + (f"; devices: {devices}" if devices else ""))


def _launch(launch: Launch) -> str:
    lines = [
        f"{launch.number}: {launch.call} of {launch.demangled or launch.kernel} returned {launch.code}",
        f"grid {launch.grid}, block {launch.block}, shared memory {launch.shared} bytes",
    ]
    return "\n".join([*lines, *(f"{name} {value}" for name, value in launch.attributes.items())])


def _fenced(language: str, content: str) -> Iterator[str]:
    """A code block that its content cannot close."""
    longest = max((len(run) for run in _runs_of_ticks(content)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}{language}\n{content}\n{fence}"


def _runs_of_ticks(content: str) -> Iterator[str]:
    run = ""
    for character in [*content, " "]:
        if character == "`":
            run += character
        elif run:
            yield run
            run = ""


def _plain(said: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no mention, one line."""
    one_line = " ".join(said.split())
    escaped = "".join(f"\\{c}" if c in r"\`*_[]<>#|~$" else c for c in one_line)
    return escaped.replace("@", "@\u200b").replace("&", "&amp;")


def _code(said: str | None) -> str:
    return " ".join((said or "").replace("`", "'").split())
