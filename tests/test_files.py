"""Files of the cache appear whole or not at all, also when their writer is killed, and are not read when they were cut."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isolate import files
from tests.conftest import ROOT


def written(text: str, name: str = "made"):  # type: ignore[no-untyped-def]
    def write(path: Path) -> str:
        path.write_text(text)
        return name

    return write


@pytest.fixture(params=["unnamed", "renamed"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has files without a name, and one that has none."""
    if request.param == "unnamed":
        return
    right = os.open

    def without(path: object, flags: int, *more: object, **other: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return right(path, flags, *more, **other)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", without)


def test_a_file_appears_under_its_name_alone(tmp_path: Path, file_system: None) -> None:
    for text in ("one", "two"):
        assert files.appear(tmp_path, written(text)).read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_one_that_fails_leaves_nothing(tmp_path: Path, file_system: None) -> None:
    def fail(path: Path) -> str:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.appear(tmp_path, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from isolate import files\n"
        "def write(path):\n    path.write_bytes(bytes(1000)); os.kill(os.getpid(), 9)\n"
        "files.appear(Path(sys.argv[1]), write)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_cut_file_of_a_cache_is_made_again(tmp_path: Path) -> None:
    times: list[Path] = []

    def write(path: Path) -> None:
        times.append(path)
        path.write_text("whole")

    made = files.kept(tmp_path, "name", ".txt", write)
    assert files.kept(tmp_path, "name", ".txt", write) == made
    assert len(times) == 1
    made.write_text("who")
    assert files.kept(tmp_path, "name", ".txt", write).read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == [made.name]


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert len(files.read(tmp_path / "file", 1 << 20)) == 1 << 20
    for path in (tmp_path / "file", Path("/dev/zero")):
        with pytest.raises(OSError, match="larger than 0 MiB"):
            files.read(path, (1 << 20) - 1)
