"""Files that appear whole or not at all, and files that are read up to a limit."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def appear(folder: Path, write: Callable[[Path], str]) -> Path:
    """Let `write` fill a file that has no name, at the path it is given; what it returns is the file's name in `folder`.

    Whoever is killed meanwhile leaves nothing behind. OSError where it cannot be written. Where the file system has no files
    without a name, a temporary one is renamed.
    """
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        return _renamed(folder, write)
    try:
        path = folder / write(Path(f"/proc/self/fd/{file}"))
        _name(file, path)
    finally:
        os.close(file)
    return path


def _name(file: int, path: Path) -> None:
    source = f"/proc/self/fd/{file}"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # with a descriptor of the folder Python follows the link of /proc (linkat, AT_SYMLINK_FOLLOW)
        os.link(source, path.name, dst_dir_fd=folder)
    except FileExistsError:
        beside = f".{path.name}-{os.getpid()}"
        os.link(source, beside, dst_dir_fd=folder)
        os.replace(beside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _renamed(folder: Path, write: Callable[[Path], str]) -> Path:
    handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
    os.close(handle)
    temporary = Path(name)
    try:
        return temporary.replace(folder / write(temporary))
    finally:
        temporary.unlink(missing_ok=True)


def kept(folder: Path, name: str, suffix: str, write: Callable[[Path], None]) -> Path:
    """A file of a cache, made by `write` where it is not there or was cut: its size is part of its name. OSError as `appear`."""
    for path in folder.glob(f"{name}-*{suffix}"):
        with contextlib.suppress(FileNotFoundError):
            if path.name == f"{name}-{path.stat().st_size}{suffix}":
                return path

    def sized(path: Path) -> str:
        write(path)
        return f"{name}-{path.stat().st_size}{suffix}"

    folder.mkdir(parents=True, exist_ok=True)
    return appear(folder, sized)


def read(path: Path, most: int) -> bytes:
    """What is in a file. OSError where it cannot be read, or holds more than `most` bytes, as a device may."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB")
    return data


def cache_folder(name: str) -> Path:
    """Where what can be made again is kept: $XDG_CACHE_HOME/isolate/NAME, by default below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification: a relative path is to be ignored
    return (Path(home) if home.startswith("/") else Path.home() / ".cache") / "isolate" / name
