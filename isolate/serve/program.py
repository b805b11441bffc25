"""A user's program, looked at before it is started: can a library be put in front of its libllama?

What cannot be recorded is said in one sentence: a program that is not there, is set-user-id, is for another machine, or
has libllama linked into it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import subprocess
from functools import cache
from pathlib import Path

from isolate.errors import IsolateError
from isolate.library.elf import Elf, ElfError, read_elf, this_machine

#: In the text of every program that has libllama inside.
_INSIDE = b"llama_init_from_model"


class RecordError(IsolateError):
    """A program cannot be recorded: says why, and what to do."""


def find_program(word: str) -> Path:
    """The file that a shell would start for this word."""
    found = shutil.which(word)
    if found is None:
        there = Path(word).exists()
        raise RecordError(
            f"{word}: {'it may not be started (no permission, or a folder)' if there else 'no such program'}"
        )
    return Path(found).resolve()


def check_program(path: Path) -> Path | None:
    """The libllama that the program is linked with, where that can be told. RecordError when it cannot be recorded."""
    mode = path.stat().st_mode
    if mode & (stat.S_ISUID | stat.S_ISGID):
        raise RecordError(
            f"{path}: it is set-user-id, so the linker lets no library be preloaded: record it as its user"
        )
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    if start != b"\x7fELF":
        return None  # A script: what it starts is recorded.
    try:
        elf = read_elf(path)
    except (ElfError, OSError):
        _inside(path)
        return None
    if elf.machine != this_machine():
        raise RecordError(f"{path}: it is for {elf.machine}, this machine is {this_machine()}")
    needed, linked = linked_llama(path, elf)
    if not needed:
        _inside(path)
    return linked


def linked_llama(path: Path, elf: Elf) -> tuple[bool, Path | None]:
    """Whether a program needs a shared libllama, directly or through others, and where that is if it is found."""
    seen: set[str] = set()
    waiting = [(path, elf)]
    while waiting:
        owner, needs = waiting.pop()
        for name in needs.needed:
            if name in seen:
                continue
            seen.add(name)
            found = _library(name, owner, needs)
            if name.startswith("libllama.so"):
                return True, found
            if found is None:
                continue
            try:
                waiting.append((found, read_elf(found)))
            except (ElfError, OSError):
                continue
    return False, None


def _library(name: str, owner: Path, elf: Elf) -> Path | None:
    """Where the linker finds a library: the folders of the file that needs it, LD_LIBRARY_PATH, what ldconfig found."""
    folders = [
        folder.replace("$ORIGIN", str(owner.parent)).replace("${ORIGIN}", str(owner.parent)) for folder in elf.search
    ]
    folders += [folder or "." for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    places = [Path(folder, name) for folder in folders if folder]
    places += [_cached()[name]] if name in _cached() else []
    return next((place.resolve() for place in places if place.is_file()), None)


@cache
def _cached() -> dict[str, Path]:
    """The linker's cache: libraries in the system's folders, by name."""
    try:
        done = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    except OSError:
        return {}
    found: dict[str, Path] = {}
    for line in done.stdout.splitlines():
        name, arrow, place = line.strip().partition(" => ")
        if arrow:
            found.setdefault(name.split(" ")[0], Path(place))
    return found


def _inside(path: Path) -> None:
    """RecordError when the program has libllama inside."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(_INSIDE) >= 0:
            raise RecordError(
                f"{path}: it links libllama statically, so nothing can stand in front of it: use a build of it with shared "
                "libraries (-DBUILD_SHARED_LIBS=ON)"
            )
