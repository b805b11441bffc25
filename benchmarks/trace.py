"""What seeing every launch costs: milliseconds a decode under each way of watching, CUDA graphs off.

    python benchmarks/trace.py --build DIR [--target cuda] [--ways check,untraced] [--rounds 11] [--starts 1]

Two slots decode a token each, again and again, on the zoo's hybrid MoE in Q3_K. Every way has a child of its own; they
take turns, so that a ratio is of runs next to each other. A child keeps its place in memory and on the processor as long
as it lives: `--starts` ends them all and starts new ones, so that this evens out too. Medians, and how far the middle
half of the ratios reaches; ways that this machine cannot do say why.

Two processes of the same kind differ by more than the hooks cost, so what the check costs is also measured in one: its
hooks hand the calls of every other twenty decodes on and do nothing else (`passed`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from isolate import case as cases
from isolate.replay.target import Target, child_environment, find

DECODES = 200
#: Turns before the first that counts: by then the trace has been written once, and its pages are no longer new.
WARM = 3
#: Decodes in a row that are all watched or all handed on; the first of them is not counted.
BLOCK = 20

#: Way -> what it is. The hooks' modes are named as in isolate.trace.hooks.
WAYS = {
    "untraced": "no hooks",
    "check": "hooks: return codes, cudaPeekAtLastError",
    "passed": "the hooks of check hand calls on: decodes of the same process in between",
    "sync": "hooks, the stream synchronized after each launch",
    "blocking": "no hooks, CUDA_LAUNCH_BLOCKING=1",
    "fence": "hooks, each allocation ends at an unmapped page",
    "cupti": "CUPTI's callbacks",
    "cupti-sync": "CUPTI's callbacks, the stream synchronized after each launch",
    "memcheck": "compute-sanitizer memcheck",
}
#: Way, what it is held against, and the share of it that is aimed at.
AIMS = (
    ("check", "untraced", "at most 1.05"),
    ("check", "passed", "at most 1.05"),
    ("sync", "blocking", "at most 1"),
    ("fence", "check", "at most 1.2"),
    ("memcheck", "check", "at least 10"),
)


def two_slots() -> cases.Case:
    """A short prompt in each of two slots, then one token a slot."""
    prompts = [
        {"slot": slot, "tokens": {"count": 16, "first": 13 * slot, "stride": 7, "modulo": 120}} for slot in (0, 1)
    ]
    steps: list[Any] = [{"step": "decode", "batch": prompts}]
    steps += [
        {"step": "decode", "batch": [{"slot": slot, "tokens": [i % 120]} for slot in (0, 1)]} for i in range(DECODES)
    ]
    context = {"n_seq_max": 2, "n_ctx": 1024, "type_k": "q8_0", "type_v": "q8_0", "flash_attn_type": "enabled"}
    data = {"isolate": 1, "model": {"zoo": "qwen35moe", "type": "q3_k"}, "context": context, "steps": steps}
    return cases.parse(json.dumps(data).encode(), "benchmark")


class Silent:
    """A writer that writes nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


def child(way: str, build: str, before: list[str]) -> None:
    """For every line read, the median milliseconds of a decode, printed; for check also of the decodes in between."""
    from isolate.library.bind import Library
    from isolate.library.find import find_build
    from isolate.models import make
    from isolate.replay.engine import Engine
    from isolate.replay.loaded import Models
    from isolate.replay.target import ALL_LAYERS
    from isolate.trace.hooks import Hooks
    from isolate.trace.ring import Writer

    writer: Any = Silent()
    hooked = way in ("check", "sync", "fence")
    if hooked:
        writer = Writer(f"/proc/self/fd/{os.memfd_create('trace')}")
        hooks = Hooks(writer)
        hooks.set_modes([way] if way != "check" else [])
    library = Library(find_build(build), [Path(path) for path in before])
    library.llama_backend_init()
    if way.startswith("cupti"):
        writer = Writer(f"/proc/self/fd/{os.memfd_create('trace')}")  # after the build: no hook is in force
        why_not = Hooks(writer).attach_cupti()
        if why_not:
            print(why_not, flush=True)
            return
        Hooks(writer).set_modes(["sync"] if way == "cupti-sync" else [])
    if hooked:
        hooks.live()  # as isolate's own child does: where every call is hooked, the last error need not be asked for twice
    models = Models(library, writer, ALL_LAYERS)
    models.load(make(library, "qwen35moe", "Q3_K", 1))
    case = two_slots()
    for turn in count():
        if turn == WARM:
            print("ready", flush=True)
        if turn >= WARM and not sys.stdin.readline():
            break
        engine = Engine(library, writer, models, case)
        engine.open()
        times, start = [], time.perf_counter()
        for number, _ in enumerate(engine.steps()):
            now = time.perf_counter()
            times.append(1000 * (now - start))
            if way == "check" and number % BLOCK == 0 and turn >= WARM:
                hooks.pass_on(number // BLOCK % 2 == 1)
            start = time.perf_counter()
        if way == "check":
            hooks.pass_on(False)
        engine.close()
        # Step 0 is the prompts; blocks follow, the first of them to warm up.
        blocks = [times[first + 1 : first + BLOCK] for first in range(1 + BLOCK, len(times), BLOCK)]
        parts = [blocks[1::2], blocks[0::2]] if way == "check" else [blocks]
        if turn >= WARM:
            print(*(median(ms for block in part for ms in block) for part in parts), flush=True)
    os._exit(0)


class Child:
    """One way of watching, at work."""

    def __init__(self, way: str, build: str, target: Target) -> None:
        command = [sys.executable, __file__, "--child", way, "--build", build, "--before", *map(str, target.before)]
        environment = {**child_environment(target), "GGML_CUDA_DISABLE_GRAPHS": "1"}
        if way == "blocking":
            environment["CUDA_LAUNCH_BLOCKING"] = "1"
        self.why_not = ""
        if way == "memcheck":
            sanitizer = shutil.which("compute-sanitizer")
            if sanitizer is None:
                self.why_not = "compute-sanitizer is not installed"
                return
            command = [sanitizer, "--tool", "memcheck", "--log-file", os.devnull, *command]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def wait(self) -> None:
        """Until it can be measured, or has said why not."""
        if self.why_not:
            return
        answer = self._line()
        if answer != "ready":
            _, errors = self.process.communicate()
            self.why_not = answer or (errors.strip().splitlines() or ["it died"])[-1]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self) -> list[float]:
        """Milliseconds a decode, also of those in between; nothing, and `why_not`, once the child has died."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)
        answer = self._line()
        self.why_not = "" if answer else f"it died with status {self.process.wait()}"
        return [float(word) for word in answer.split()]

    def end(self) -> None:
        """It ends when nothing more is to be read."""
        if not self.why_not:
            self.process.communicate()


def measure(ways: list[str], build: str, target: Target, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds a decode of each way's turns, with a child started for each; why a way could not be measured."""
    children = {way: Child(way, build, target) for way in ways if way != "passed"}
    for one in children.values():
        one.wait()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        # There and back, so that none always follows the same other.
        for way, one in list(children.items())[:: 1 if turn % 2 else -1]:
            for name, found in zip([way, "passed"], one.measure() if not one.why_not else [], strict=False):
                times[name].append(found)
    for one in children.values():
        one.end()
    why_not = {way: one.why_not for way, one in children.items() if one.why_not}
    return times, why_not | ({"passed": why_not["check"]} if "check" in why_not else {})


def main() -> None:
    """Print the figures, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.environ.get("ISOLATE_BUILD"), required="ISOLATE_BUILD" not in os.environ)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}; untraced is always measured")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each child")
    parser.add_argument("--starts", type=int, default=1, help="times that new children are started")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--before", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.build, options.before)
        return
    target = find(options.target, options.build)
    wanted = {"untraced", *options.ways.split(",")}
    wanted |= {"check", "passed"} if wanted & {"check", "passed"} else set()
    ways = [way for way in WAYS if way in wanted]
    times: dict[str, list[float]] = {way: [] for way in ways}
    why_not: dict[str, str] = {}
    for _ in range(options.starts):
        of_start, died = measure([way for way in ways if way not in why_not], options.build, target, options.rounds)
        why_not |= died
        for way, found in of_start.items():
            times[way] += found
    print(f"{'':11}  ms a decode  over untraced")
    for way in ways:
        if way in why_not:
            print(f"{way:11}  {'-':>11}  {'-':>13}   {WAYS[way]}: {why_not[way]}")
            continue
        print(f"{way:11}  {median(times[way]):11.3f}  {median(ratios(times, way, 'untraced')):13.2f}   {WAYS[way]}")
    print()
    for way, other, aim in AIMS:
        if {way, other} <= set(ways) - set(why_not):
            pairs = ratios(times, way, other)
            low, _, high = quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
            spread = f"middle half of {len(pairs)} pairs {low:.3f} to {high:.3f}"
            print(f"{way} over {other}: {median(pairs):.3f} ({spread}; aim: {aim})")


def ratios(times: dict[str, list[float]], way: str, other: str) -> list[float]:
    """Of runs that were next to each other."""
    return [one / base for one, base in zip(times[way], times[other], strict=True)]


if __name__ == "__main__":
    main()
