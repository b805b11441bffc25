"""What `serve/` says a server does, held against a real llama-server under the recorder, step by step.

Left out of the comparison: what the server does before its first request (it decodes two tokens to see whether a tail
can be removed, and clears them), the names of states, which are told apart by slot, kind and length instead, sampled
tokens where the server's answer was an error, and checkpoints that this newer server keeps in the files of slots.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from isolate import case as cases
from isolate.case import Checkpoint, Clear, Decode, Load, Pattern, Restore, Save, SeqAdd, SeqRm, Step
from isolate.replay.engine import ends_after
from isolate.replay.supervisor import Supervisor
from isolate.serve.memory import Memory
from isolate.serve.options import options
from isolate.serve.requests import Request
from isolate.serve.slots import Server
from isolate.zoo import ZOO
from tests.servers import RunningServer

SWITCHES = {"cont-batching", "cache-prompt", "cache-idle-slots", "context-shift", "kv-unified", "swa-full"}


@dataclass(frozen=True)
class Ask:
    """One prompt."""

    prompt: list[int]
    slot: int = -1
    n_predict: int = 4
    #: of `/slots/N`, instead of a prompt
    action: Literal["complete", "save", "restore", "erase"] = "complete"


@dataclass(frozen=True)
class Setting:
    """A server and what it is asked: the asks of a turn arrive together, a turn begins when the last is answered."""

    name: str
    zoo: str
    turns: list[list[Ask]]
    options: dict[str, Any] = field(default_factory=dict)


def prompt(count: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 120 for i in range(count)]


def twice(*lengths: int) -> list[Ask]:
    return [Ask(prompt(length, 13 * i)) for i, length in enumerate(lengths)]


SMALL = {"batch-size": 64, "ubatch-size": 32}
DIVERGES = [[Ask(prompt(300))], [Ask([*prompt(200), 1, 2, 3])], [Ask([*prompt(120), 4, 5])]]
SETTINGS = [
    Setting("two slots of a hybrid", "qwen35moe", [twice(1000, 1000)], {"parallel": 2}),
    Setting("three slots, small batches", "qwen35moe", [twice(150, 90, 200)], {"parallel": 3, **SMALL}),
    Setting("prefix reuse", "llama", [[Ask(prompt(200))], [Ask([*prompt(150), 1, 2, 3])], [Ask(prompt(200))]]),
    Setting("divergence of a hybrid", "qwen35moe", DIVERGES, SMALL),
    Setting("divergence, checkpoints off", "qwen35moe", DIVERGES, {"ctx-checkpoints": 0, **SMALL}),
    Setting(
        "few checkpoints", "lfm2", [*DIVERGES, *DIVERGES], {"ctx-checkpoints": 2, "checkpoint-min-step": 0, **SMALL}
    ),
    Setting("sliding window", "gemma3", DIVERGES, SMALL),
    Setting("sliding window, early divergence", "gemma3", [[Ask(prompt(200))], [Ask([*prompt(20), 1, 2, 3])]], SMALL),
    Setting(
        "sliding window, used again",
        "gemma3",
        [[Ask(prompt(700))], [Ask([*prompt(400), 1, 2, 3])], [Ask([*prompt(395), 4, 5])]],
        SMALL,
    ),
    Setting("sliding window, whole", "gemma3", DIVERGES, {"swa-full": True, **SMALL}),
    Setting("recurrent only", "mamba2", [twice(100, 80), twice(120, 60)], {"parallel": 2}),
    Setting("cache RAM brings a prompt back", "llama", [[Ask(prompt(200))], [Ask(prompt(200, 3))], [Ask(prompt(200))]]),
    Setting(
        "eviction from cache RAM",
        "llama",
        [[Ask(prompt(700))], [Ask(prompt(700, 3))], [Ask(prompt(700, 5))], [Ask(prompt(700))]],
        {"cache-ram": 1},
    ),
    Setting(
        "cache RAM off", "llama", [[Ask(prompt(200))], [Ask(prompt(200, 3))], [Ask(prompt(200))]], {"cache-ram": 0}
    ),
    Setting(
        "idle slots are saved",
        "qwen35moe",
        [[Ask(prompt(90), 0)], [Ask(prompt(80, 3), 1)], [Ask(prompt(90), 1)]],
        {"parallel": 2},
    ),
    Setting(
        "idle slots, unified",
        "llama",
        [[Ask(prompt(90), 0)], [Ask(prompt(80, 3), 1)], [Ask(prompt(90), 0)]],
        {"parallel": 2, "kv-unified": True},
    ),
    Setting("more requests than slots", "qwen35moe", [twice(50, 40, 60, 30)], {"parallel": 2}),
    Setting("no continuous batching", "llama", [twice(50, 40, 60, 30)], {"parallel": 2, "cont-batching": False}),
    Setting(
        "chunks are moved", "llama", [[Ask(prompt(90))], [Ask([*prompt(20), *prompt(90)[40:]])]], {"cache-reuse": 16}
    ),
    Setting(
        "context shift",
        "llama",
        [[Ask(prompt(200), n_predict=80)]],
        {"ctx-size": 256, "context-shift": True, "keep": 10},
    ),
    Setting("full context", "llama", [[Ask(prompt(200), n_predict=80)]], {"ctx-size": 256}),
    Setting(
        "no room: an idle slot goes",
        "llama",
        [[Ask(prompt(200), 0)], [Ask(prompt(200, 3), 1)]],
        {"parallel": 2, "ctx-size": 256, "kv-unified": True, "cache-idle-slots": False},
    ),
    Setting(
        "no room at all",
        "llama",
        [twice(150, 150)],
        {"parallel": 2, "ctx-size": 256, "kv-unified": True, "cache-ram": 0},
    ),
    Setting(
        "slots in files",
        "llama",
        [
            [Ask(prompt(90), 0)],
            [Ask([], 0, action="save")],
            [Ask([], 0, action="erase")],
            [Ask(prompt(50, 3), 0)],
            [Ask([], 0, action="restore")],
            [Ask([*prompt(90), 1, 2], 0)],
        ],
    ),
    Setting("no prompt cache", "llama", [[Ask(prompt(60))], [Ask(prompt(60))]], {"cache-prompt": False}),
]


def command_line(given: dict[str, Any]) -> list[object]:
    words: list[object] = []
    for name, value in given.items():
        if name in SWITCHES:
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", value]
    return words


def plainly(steps: Iterable[Step], known: bool) -> list[Any]:
    """Steps without names and short forms: every position and token said; sampled tokens only where they are `known`."""
    ends: dict[int, int] = {}
    states: dict[str, tuple[Any, ...]] = {}
    found: list[Any] = []
    for step in steps:
        match step:
            case Decode():
                runs, before = [], dict(ends)
                for run in step.batch:
                    start = ends.get(run.slot, 0) if isinstance(run.at, msgspec.UnsetType) else run.at
                    tokens: Any = run.tokens.tokens() if isinstance(run.tokens, Pattern) else run.tokens
                    ends[run.slot] = start + run.count()
                    hidden = not known and run.count() == 1
                    runs.append((run.slot, start, "sampled" if hidden else list(tokens), run.outputs()))
                ends = before if step.returns == 1 else ends
                found.append(("decode", runs, step.returns == 1))
            case Checkpoint() | Save():
                states[step.name] = (step.kind, step.slot, ends.get(step.slot, 0))
                found.append(("take", *states[step.name]))
            case Restore() | Load():
                slot = states[step.name][1] if isinstance(step.slot, msgspec.UnsetType) else step.slot
                ends[slot] = states[step.name][2]
                found.append(("set", slot, *states[step.name]))
            case SeqRm():
                found.append(("seq_rm", step.slot, step.p0, step.p1))
                ends = ends_after(ends, step)
            case SeqAdd():
                found.append(("seq_add", step.slot, step.p0, step.p1, step.delta))
                ends = ends_after(ends, step)
            case _:
                found.append(step)
                ends = ends_after(ends, step)
    return found


def answered(server: RunningServer, turn: list[Ask], keep: int) -> list[list[int]]:
    """The answers to a turn; without tokens where the server refuses it, or where nothing is to be answered."""
    first = turn[0]
    if first.action != "complete":
        server.ask(f"/slots/{first.slot}?action={first.action}", {"filename": "kept"})
        return [[]]
    try:
        return server.complete([ask.prompt for ask in turn], first.n_predict, id_slot=first.slot, n_keep=keep)
    except urllib.error.HTTPError as error:
        error.close()
        return [[] for _ in turn]


def request(ask: Ask, last: int | None) -> Request:
    name = "kept" if ask.action in ("save", "restore") else None
    return Request(prompt=ask.prompt, n_predict=ask.n_predict, slot=ask.slot, after=last, action=ask.action, name=name)


def after_the_probe(steps: list[Step]) -> list[Step]:
    cleared = [index for index, step in enumerate(steps) if isinstance(step, Clear)]
    return steps[cleared[-1] + 1 :]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The zoo's models in files."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    with Supervisor() as children:
        for name in sorted({setting.zoo for setting in SETTINGS}):
            made[name] = folder / f"{name}.gguf"
            children.make_model(name, "F32", 1, made[name])
    return made


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_steps_are_those_of_a_real_server(setting: Setting, models: dict[str, Path], tmp_path: Path) -> None:
    given = {"ctx-size": 4096, "parallel": 1, **setting.options}
    recorded = tmp_path / "recorded.json"
    answers: list[list[int]] = []
    words = [*command_line({name: value for name, value in given.items() if name != "keep"})]
    with RunningServer(models[setting.zoo], recorded, "--slot-save-path", tmp_path, *words) as server:
        for turn in setting.turns:
            answers += answered(server, turn, given.get("keep", 0))
    requests: list[Request] = []
    for turn in setting.turns:
        last = len(requests) - 1 if requests else None
        requests += [request(ask, last) for ask in turn]
    said = list(Server(options(given, "test"), Memory.of(ZOO[setting.zoo]), requests, dict(enumerate(answers))).steps())
    real = after_the_probe(cases.read(recorded).steps)
    known = any(answers)
    for number, (ours, theirs) in enumerate(zip(plainly(said, known), plainly(real, known), strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(said) == len(real)
