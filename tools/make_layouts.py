"""Writes isolate/library/layouts.json: how the structs of released llama.cpp versions lie in memory, as facts.

Two kinds of package carry a released llama.h: the source distributions of llama-cpp-python (with llama.cpp's source,
so with the defaults), and the wheels of llama-cpp-py-sync, one for a llama.cpp release bNNNN (declarations only). Each
is downloaded with pip and read as text; nothing in it is run, built or copied. A wheel has no macros: it is given the
LLAMA_STATE_SEQ_FLAGS_ of the newest source distribution.

    python tools/make_layouts.py                    everything, a few minutes and 2 GB of downloads
    python tools/make_layouts.py --keep FOLDER      the same, headers kept there for the next time
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path

import click

from isolate.library.header import STATE_FLAGS, Declarations, parse, read_header

#: the first llama-cpp-python whose llama.h has today's calls (llama_memory_*, llama_state_seq_*)
FIRST = (0, 3, 9)
#: llama.cpp releases newer than the newest llama-cpp-python, the newest first
RELEASES = (11739, 11548, 11413, 11391, 11352, 11327, 11227, 11067, 10952, 10837)
TABLE = Path(__file__).parent.parent / "isolate" / "library" / "layouts.json"

#: of a source distribution, what `read_header` reads
WANTED = re.compile(
    r"vendor/llama\.cpp/(include/llama\.h|ggml/include/(ggml|ggml-backend)\.h|src/llama-(model|context|quant)\.cpp)$"
)


def pip(*arguments: str) -> str:
    """Runs pip, quietly, and returns what it printed."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, capture_output=True, text=True).stdout


def python_versions() -> list[str]:
    """llama-cpp-python's releases from FIRST on, the newest first."""
    listed = re.search(r"Available versions: (.*)", pip("index", "versions", "llama-cpp-python"))
    versions = listed[1].split(", ") if listed else []
    return [version for version in versions if tuple(map(int, version.split("."))) >= FIRST]


def from_source(version: str, keep: Path) -> Declarations:
    """Declarations of a llama-cpp-python release."""
    folder = keep / f"llama-cpp-python-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as temporary:
            pip(
                "download",
                "--no-deps",
                "--no-binary",
                "llama-cpp-python",
                "--dest",
                temporary,
                f"llama-cpp-python=={version}",
            )
            with tarfile.open(next(Path(temporary).glob("*.tar.gz"))) as archive:
                for member in archive:
                    found = WANTED.search(member.name)
                    text = archive.extractfile(member) if found else None
                    if found and text:
                        target = folder / found[1]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(text.read())
    return read_header(folder / "include" / "llama.h")


def from_wheel(release: int, keep: Path) -> Declarations:
    """Declarations of a llama.cpp release, from the wheel of llama-cpp-py-sync that declares them for cffi."""
    file = keep / f"llama.cpp-b{release}.txt"
    if not file.exists():
        with tempfile.TemporaryDirectory() as temporary:
            platform = ["--only-binary", ":all:", "--platform", "manylinux2014_x86_64"]
            pip("download", "--no-deps", *platform, "--dest", temporary, f"llama-cpp-py-sync==0.{release}")
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
                file.write_bytes(archive.read("llama_cpp_py_sync/_cffi_bindings.py"))
    return parse(file.read_text(), file.name)


def releases(keep: Path) -> Iterator[tuple[str, Declarations]]:
    """Every release of the table, the newest first."""
    for release in RELEASES:
        yield f"llama.cpp b{release}", from_wheel(release, keep)
    for version in python_versions():
        yield f"llama-cpp-python {version}", from_source(version, keep)


def grouped(entries: list[tuple[str, object]], key: str) -> list[dict[str, object]]:
    """Equal entries once, with the releases that have them."""
    groups: list[dict[str, object]] = []
    for release, entry in entries:
        same = next((group for group in groups if group[key] == entry), None)
        if same is None:
            groups.append({"releases": [release], key: entry})
        else:
            same["releases"].append(release)  # type: ignore[attr-defined]
    return groups


@click.command(help=__doc__)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for what was read from the packages.")
def main(keep: Path | None) -> None:
    """Writes the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Declarations] = {}
        for release, declared in releases(folder):
            click.echo(f"{release}: {', '.join(declared.structs)}")
            found[release] = declared
    flags = next(declared.enums[STATE_FLAGS] for declared in found.values() if STATE_FLAGS in declared.enums)
    for release, declared in found.items():
        if release.startswith("llama.cpp"):
            found[release] = replace(declared, enums={**declared.enums, STATE_FLAGS: flags})
    structs: dict[str, list[tuple[str, object]]] = {}
    enums: dict[str, list[tuple[str, object]]] = {}
    for release, declared in found.items():
        for name, fields in declared.structs.items():
            structs.setdefault(name, []).append((release, [list(astuple(field)) for field in fields]))
        for name, values in declared.enums.items():
            enums.setdefault(name, []).append((release, dict(values)))
    table = {
        "releases": list(found),
        "structs": {name: grouped(entries, "fields") for name, entries in structs.items()},
        "enums": {name: grouped(entries, "values") for name, entries in enums.items()},
    }
    TABLE.write_text(text_of(table))


def text_of(table: Mapping[str, object]) -> str:
    """The file's text: JSON, with a field a line."""
    text = json.dumps(table, indent=1)
    return (
        re.sub(r"\[\s+(\"\w+\"),\s+(\"[\w ]+\"),\s+(\d+),\s+(\d+),\s+([-\w.]+)\s+\]", r"[\1, \2, \3, \4, \5]", text)
        + "\n"
    )


if __name__ == "__main__":
    main()
