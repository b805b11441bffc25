"""From a folder to the libraries in it: which libllama, what it needs and in which order, and the header it came from.

Nothing is loaded here. The parent process may call this; only a child loads what it returns.
"""

from __future__ import annotations

import filecmp
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isolate.errors import BuildError
from isolate.library.elf import Elf, ElfError, read_elf, this_machine

#: libllama.so, libllama.so.0.5.0, libllama.cuda.v0.5.0.so; not libllama-common.so, libllama-server-impl.so
_LLAMA = re.compile(r"libllama(\.[\w.]+)?\.so(\.\d+)*")
#: the registry (libggml.so.0, libggml.cuda.v0.5.0.so), not libggml-base.so or a backend
_REGISTRY = re.compile(r"libggml(\.[\w.]+)?\.so(\.\d+)*")
#: libggml-cpu.so.0, libggml-cuda.so, libggml-cpu-haswell.so; not libggml-base
_BACKEND = re.compile(r"libggml-(?!base\b)[\w-]+\.so(\.\d+)*")
#: where a CMake build, an installed prefix or a wheel's package keeps its libraries, below the folder that was named
_BELOW = ("", "bin", "lib", "lib64")
#: where the headers are, seen from a source tree (llama.cpp's own, and one that has llama.cpp as a part)
_HEADER_IN_SOURCE = ("include/llama.h", "vendor/llama.cpp/include/llama.h", "llama.cpp/include/llama.h")
#: any libllama of the last years defines this
_LLAMA_SYMBOL = "llama_backend_init"

_WHAT_TO_PASS = "pass --build a folder with a shared libllama (a CMake build's bin, an installed prefix, a wheel's lib)"


@dataclass(frozen=True)
class Build:
    """A libllama and what it needs; paths of real files, links resolved."""

    #: where libllama is
    folder: Path
    llama: Path
    #: ggml's libraries in the order to load them in, before libllama; empty where they are inside libllama
    ggml: tuple[Path, ...]
    #: folder for `ggml_backend_load_all_from_path`; None where the backends are linked
    backends: Path | None
    #: the llama.h it was made from; None where none is known
    header: Path | None

    def key(self) -> str:
        """A short id of the build's content, for caches: 16 hex digits of the libraries' build ids or names and times."""
        digest = hashlib.sha256()
        files = [*self.ggml, self.llama]
        if self.backends is not None:
            files += sorted(path for path in self.backends.iterdir() if _BACKEND.fullmatch(path.name))
        for path in files:
            build_id = read_elf(path).build_id
            state = path.stat()
            digest.update(f"{build_id or (path, state.st_mtime_ns)} {state.st_size}\n".encode())
        return digest.hexdigest()[:16]


def find_build(where: str | Path | None = None, include: str | Path | None = None) -> Build:
    """Finds the build to drive: `where`, else ISOLATE_BUILD, else llama-cpp-python's own.

    `where` is a CMake build's folder or its bin, an installed prefix, a wheel's lib or package folder, or a libllama
    file. `include` is the llama.h it was made from, or a folder that has it. Loads nothing. `BuildError` where there is
    no libllama for this machine, or more than one.
    """
    set_to = os.environ.get("ISOLATE_BUILD")
    named = where or set_to or _llama_cpp_python()
    try:
        return _build_at(Path(named), include)
    except BuildError as error:
        # Who set it long ago, or in another file, does not think of it.
        told = f" (ISOLATE_BUILD is set to {set_to})" if str(named) == set_to else ""
        raise BuildError(error.message + told) from error


def _build_at(place: Path, include: str | Path | None) -> Build:
    if not place.exists():
        raise BuildError(f"{place} does not exist: {_WHAT_TO_PASS}, or the libllama file itself")
    llama = _checked(place) if place.is_file() else _llama_below(place)
    llama = llama.resolve()
    order = _load_order(llama)
    return Build(
        folder=llama.parent,
        llama=llama,
        ggml=order,
        backends=_dynamic_backends(llama, order),
        header=_named_header(Path(include)) if include else _header_of(llama.parent),
    )


def _llama_cpp_python() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise BuildError(f"llama-cpp-python, the default build, is not installed: install it, or {_WHAT_TO_PASS}")
    return Path(spec.origin).parent / "lib"


def _checked(path: Path) -> Path:
    """The file, if it is a libllama this machine can load."""
    elf = _read(path)
    if not elf.mentions(_LLAMA_SYMBOL):
        raise BuildError(f"{path} is not a libllama (it has no {_LLAMA_SYMBOL}): {_WHAT_TO_PASS}")
    return path


def _read(path: Path) -> Elf:
    try:
        elf = read_elf(path)
    except ElfError as error:
        if path.suffix == ".a" or "archive" in str(error):
            raise BuildError(_static(path)) from error
        raise BuildError(f"{path} is {error}: {_WHAT_TO_PASS}") from error
    except OSError as error:
        raise BuildError(f"{path} cannot be read ({error.strerror}): {_WHAT_TO_PASS}") from error
    if elf.machine != this_machine():
        raise BuildError(f"{path} is for {elf.machine}, this machine is {this_machine()}: pass --build one made for it")
    return elf


def _static(path: Path) -> str:
    return f"{path} is a static library, which cannot be loaded: build llama.cpp with -DBUILD_SHARED_LIBS=ON"


def _llama_below(place: Path) -> Path:
    folders = [place / below for below in _BELOW if (place / below).is_dir()]
    found: list[Path] = []
    for path in sorted(path for folder in folders for path in folder.iterdir() if _LLAMA.fullmatch(path.name)):
        # A wheel cannot hold links, so it holds one library three times.
        if path.is_file() and not any(_same(path, other) for other in found):
            found.append(path)
    if not found:
        for folder in folders:
            if (folder / "libllama.a").exists():
                raise BuildError(_static(folder / "libllama.a"))
        looked = ", ".join(below for below in _BELOW if below)
        raise BuildError(f"no libllama.so in {place} (nor in its {looked}): {_WHAT_TO_PASS}")
    if len(found) > 1:
        names = " and ".join(str(path) for path in found)
        raise BuildError(f"{place} has {len(found)} different libllamas, {names}: pass --build the file that is meant")
    return _checked(found[0])


def _same(one: Path, other: Path) -> bool:
    return one.samefile(other) or filecmp.cmp(one, other, shallow=False)


def _load_order(llama: Path) -> tuple[Path, ...]:
    """The ggml libraries `llama` needs, each after those it needs itself."""
    order: list[Path] = []

    def visit(path: Path) -> None:
        elf = _read(path)
        for name in elf.needed:
            if not name.startswith("libggml"):
                continue
            library = _resolve(name, path, elf, llama)
            if library not in order and library != path:
                visit(library)
                order.append(library)

    visit(llama)
    return tuple(order)


def _resolve(name: str, path: Path, elf: Elf, llama: Path) -> Path:
    folders = [path.parent, llama.parent]
    folders += [
        Path(folder.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", str(path.parent))) for folder in elf.search
    ]
    folders += [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise BuildError(f"{path} needs {name}, which is not in {llama.parent}: pass --build the folder that has both")


def _dynamic_backends(llama: Path, order: tuple[Path, ...]) -> Path | None:
    """Where the backends to load are; None where libggml (or libllama) has them linked."""
    registries = [path for path in order if _REGISTRY.fullmatch(path.name)]
    if not registries or any(_BACKEND.fullmatch(name) for path in registries for name in read_elf(path).needed):
        return None
    folder = llama.parent
    for candidate in (folder, folder.parent / "bin", folder.parent / "lib"):
        if candidate.is_dir() and any(_BACKEND.fullmatch(path.name) for path in candidate.iterdir()):
            return candidate
    raise BuildError(
        f"{registries[0]} loads its backends at run time and there is no libggml-cpu*.so in {folder} or beside it: "
        "pass --build the folder that has them"
    )


def _named_header(include: Path) -> Path:
    candidates = (
        [include] if include.is_file() else [include / "llama.h", *(include / below for below in _HEADER_IN_SOURCE)]
    )
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise BuildError(f"no llama.h in {include}: pass --include the llama.h the build was made from, or its folder")


def _header_of(folder: Path) -> Path | None:
    for candidate in _headers_of(folder):
        if candidate.is_file():
            return candidate.resolve()
    return None


def _headers_of(folder: Path) -> Iterator[Path]:
    """Where the llama.h may be that the libraries in `folder` were made from, the surest first."""
    above = [folder, *folder.parents][:3]
    for place in above:
        if (place / "CMakeCache.txt").is_file():
            for source in _source_folders(place / "CMakeCache.txt"):
                for below in _HEADER_IN_SOURCE:
                    yield source / below
    # An installed prefix: include is beside lib, or beside the lib above lib/x86_64-linux-gnu. Not further up: a
    # wheel's lib has site-packages above it, where include belongs to whoever installed last.
    for lib in above[:2]:
        if lib.name in ("lib", "lib64"):
            yield lib.parent / "include" / "llama.h"


def _source_folders(cache: Path) -> list[Path]:
    """llama.cpp's own folder and the whole project's, as CMake noted them."""
    text = cache.read_text(errors="replace")
    values = dict(re.findall(r"^(llama\.cpp_SOURCE_DIR|CMAKE_HOME_DIRECTORY):\w+=(.+)$", text, re.MULTILINE))
    return [Path(values[name]) for name in ("llama.cpp_SOURCE_DIR", "CMAKE_HOME_DIRECTORY") if name in values]
