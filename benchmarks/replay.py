"""What a replay costs: cases a second in one warm child, the share of that time inside libllama, and start-up.

    python benchmarks/replay.py

Times are medians. The share is the time inside library calls, measured in a child that times each call, over the time a
case takes in a warm child that does not. Start-up is `isolate run` of the case over a bare ctypes script that makes the
same calls, paired: one of each in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from isolate import case as cases
from isolate.replay.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[1]
PAIRS = 15
CASES = 20


def two_slots_of_ten_decodes() -> cases.Case:
    """Two prompts in a batch, then nine decodes of a token a slot, on the tiny dense model."""
    slots = range(2)
    prompts = [
        {"slot": slot, "tokens": {"count": 32, "first": 13 * slot, "stride": 7, "modulo": 120}, "logits": "last"}
        for slot in slots
    ]
    steps: list[Any] = [{"step": "decode", "batch": prompts}]
    steps += [{"step": "decode", "batch": [{"slot": s, "tokens": [i + s]} for s in slots]} for i in range(9)]
    data = {"isolate": 1, "model": {"zoo": "llama"}, "context": {"n_seq_max": 2, "n_ctx": 1024}, "steps": steps}
    return cases.parse(json.dumps(data).encode(), "benchmark")


class Timed:
    """Stands in front of a Library and adds up the time inside its calls."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.inside = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._library, name)
        if not name.startswith(("llama_", "ggml_")):
            return value

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self.inside += time.perf_counter() - start

        setattr(self, name, timed)
        return timed


def inside(path: str) -> None:
    """In a child: for every line read, the median seconds inside the library for one case, printed."""
    from isolate.library.bind import Library
    from isolate.library.find import find_build
    from isolate.models import make
    from isolate.replay.engine import Engine
    from isolate.replay.loaded import Models
    from isolate.trace.ring import Writer

    case = cases.read(Path(path))
    writer = Writer(f"/proc/self/fd/{os.memfd_create('trace')}")
    library = Library(find_build())
    library.set_callbacks(writer.on_abort, writer.on_log, os.open(os.devnull, os.O_WRONLY))
    library.llama_backend_init()
    timed = Timed(library)
    models = Models(library, writer, 0)
    models.load(make(library, "llama", "F32", 1))
    for _ in sys.stdin:
        seconds = []
        for _ in range(CASES):
            timed.inside = 0.0
            engine = Engine(timed, writer, models, case)  # type: ignore[arg-type]
            engine.open()
            for _ in engine.steps():
                pass
            engine.close()
            seconds.append(timed.inside)
        print(median(seconds), flush=True)


BARE = """
import ctypes, sys
import llama_cpp as L
L.llama_backend_init()
m = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
p = L.llama_context_default_params(); p.n_ctx = 1024; p.n_seq_max = 2; p.n_threads = 1; p.n_threads_batch = 1
c = L.llama_init_from_model(m, p)
b = L.llama_batch_init(512, 0, 1)
def decode(rows):
    b.n_tokens = len(rows)
    for i, (t, pos, s, want) in enumerate(rows):
        b.token[i] = t; b.pos[i] = pos; b.n_seq_id[i] = 1; b.seq_id[i][0] = s; b.logits[i] = want
    assert L.llama_decode(c, b) == 0
decode([((13 * s + 7 * i) % 120, i, s, i == 31) for s in (0, 1) for i in range(32)])
for i in range(9):
    decode([(i + s, 32 + i, s, 1) for s in (0, 1)])
"""


def paired(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of each, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(PAIRS):
        for work, taken in zip((one, other), times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


def main() -> None:
    """Print the figures, a line each."""
    case = two_slots_of_ten_decodes()
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    path, model = folder / f"isolate-benchmark-{os.getpid()}.json", folder / f"isolate-benchmark-{os.getpid()}.gguf"
    case.write(path)
    try:
        with Supervisor() as children:
            children.make_model("llama", "F32", 1, model)
            children.run(case)
            inner = subprocess.Popen(
                [sys.executable, __file__, "--inside", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert inner.stdin is not None and inner.stdout is not None
            with inner, inner.stdin, inner.stdout:
                walls, shares = [], []
                for _ in range(PAIRS):
                    seconds = []
                    for _ in range(CASES):
                        start = time.perf_counter()
                        assert children.run(case).fault is None
                        seconds.append(time.perf_counter() - start)
                    print(file=inner.stdin, flush=True)
                    walls.append(median(seconds))
                    shares.append(float(inner.stdout.readline()) / walls[-1])
        print(f"cases a second in one warm child   {1 / median(walls):8.0f}")
        print(f"share of the time inside libllama  {median(shares):8.0%}")
        ours = [sys.executable, "-c", "from isolate.cli import main; main()", "run", str(path)]
        bare = [sys.executable, "-c", BARE, str(model)]
        quiet: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
        run, script = paired(lambda: subprocess.run(ours, **quiet), lambda: subprocess.run(bare, **quiet))
        print(f"`isolate run`, seconds             {run:8.2f}")
        print(f"bare script, seconds               {script:8.2f}")
        print(f"start-up over the bare script      {run - script:8.2f}")
    finally:
        path.unlink(missing_ok=True)
        model.unlink(missing_ok=True)


if __name__ == "__main__":
    inside(sys.argv[2]) if sys.argv[1:2] == ["--inside"] else main()
