"""What the tests share: the shipped build in children, and a check that nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: Workers of the tests are modules of this checkout, and no child looks for modules in the current folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def descendants(parent: int) -> list[int]:
    """Processes whose parent is `parent`, but for the one that Python's multiprocessing keeps."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"multiprocessing.resource_tracker" not in words:
            found.append(int(stat.parent.name))
    return found


def signals_as_at_a_terminal() -> None:
    """For a child to be interrupted: tests that run in the background were started with these ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def left_behind() -> set[str]:
    """Children of this process that still exist, and files in shared memory."""
    shared = {str(path) for path in Path("/dev/shm").iterdir() if "isolate" in path.name}
    return shared | {str(process) for process in descendants(os.getpid())}


def open_files() -> int:
    """Descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No child, no open file and no shared memory outlives the test."""
    before, files = left_behind(), open_files()
    yield
    assert left_behind() == before
    # Fewer: what an earlier test's processes talked through was closed meanwhile.
    assert open_files() <= files
