"""Cases that failed once are kept in a folder or on a Redis server, for other campaigns to run first."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from isolate.cli import main
from isolate.errors import IsolateError
from isolate.search.examples import Examples
from isolate.search.known import shipped

CASES = [each.case for each in shipped()[:3]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def real_server(port: int) -> Iterator[None]:
    """A Redis server that keeps nothing on disk."""
    command = shutil.which("redis-server")
    if command is None:
        pytest.skip("redis-server is not installed")
    words = [command, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        yield
        process.terminate()


@contextlib.contextmanager
def python_server(port: int) -> Iterator[None]:
    """A server that speaks like Redis."""
    fakeredis = pytest.importorskip("fakeredis")
    server = fakeredis.TcpFakeServer(("127.0.0.1", port), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["folder", "redis", "like redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "new" / "folder")
        return
    pytest.importorskip("redis")
    port = free_port()
    with (real_server if request.param == "redis" else python_server)(port):
        ends = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < ends
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}"


def test_what_one_campaign_keeps_another_gets(place: str) -> None:
    examples = Examples(place)
    assert list(examples) == []
    for case in [*CASES, CASES[0]]:
        examples.add(case)
    other = list(Examples(place))
    assert len(other) == len(CASES) and all(case in other for case in CASES)
    # What is no case, or one of another version, is none for us.
    examples.database.save(b"isolate.case/1", b"\xff not a case")
    assert list(Examples(place)) == other


@pytest.mark.parametrize("place", ["redis://", "http://host/x", "redis://127.0.0.1:not-a-port"])
def test_what_is_no_database_is_refused(place: str) -> None:
    with pytest.raises(IsolateError, match=r"name a folder, or a Redis server|not the address of a Redis server"):
        Examples(place)


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    started = time.monotonic()
    place = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(IsolateError, match=f"{place}: the example database cannot be used: .*refused"):
        Examples(place)
    assert time.monotonic() - started < 15


def test_a_campaign_with_a_database_that_does_not_answer_does_not_begin(tmp_path: Path) -> None:
    words = ["fuzz", "--database", f"redis://127.0.0.1:{free_port()}", "--out", str(tmp_path / "campaign")]
    result = CliRunner().invoke(main, words)
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and "the example database cannot be used" in line
    assert not (tmp_path / "campaign").exists()


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(IsolateError, match=f"{path}: cannot be used as an example database"):
            Examples(str(path))


def test_a_folder_that_keeps_nothing_is_one_sentence(tmp_path: Path) -> None:
    """Hypothesis passes over what it cannot write."""
    examples = Examples(str(tmp_path / "database"))
    (tmp_path / "database").rmdir()
    (tmp_path / "database").touch()
    with pytest.raises(IsolateError, match="did not keep a case"):
        examples.add(CASES[0])
