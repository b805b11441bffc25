"""What a server's log alone tells: its settings, which slot took which prompt, how long it was, what was kept of it.

The tokens are not in a log, and neither is when a request arrived while others were answered: they are assumed, each
assumption is listed, and what the log says of checkpoints and restores is compared with what the case comes to. Lines
are those of llama-server (llama.cpp 0.3.36); most that matter come with `-lv 4` or more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isolate.case import Case, Checkpoint, Model, Pattern, Restore, Step
from isolate.errors import IsolateError
from isolate.serve.memory import Memory
from isolate.serve.options import Options, options
from isolate.serve.requests import Request
from isolate.serve.slots import Server
from isolate.zoo import ZOO

MAX_BYTES = 256 << 20
MAX_TASKS = 10_000
MAX_PROMPT = 1 << 20

#: setting -> where the log says it
_SETTINGS = {
    "parallel": r"n_slots = (\d+)",
    "ctx-size": r"llama_context: n_ctx +=\s+(\d+)",
    "batch-size": r"llama_context: n_batch +=\s+(\d+)",
    "ubatch-size": r"llama_context: n_ubatch +=\s+(\d+)",
    "flash-attn": r"llama_context: flash_attn +=\s+(\w+)",
    "cache-type-k": r"K \((\w+)\): ",
    "cache-type-v": r"V \((\w+)\): ",
    "kv-unified": r"kv_unified += '?(\w+)",
    "ctx-checkpoints": r"context checkpoints enabled, max = (\d+)",
    "checkpoint-min-step": r"context checkpoints enabled, .*min spacing = (\d+)",
    "cache-ram": r"prompt cache is enabled, size limit: (\d+|no limit)",
}
_OFF = {"ctx-checkpoints": "context checkpoints disabled", "cache-ram": "prompt cache is disabled"}
_WORDS = {"enabled": "on", "disabled": "off", "auto": "auto", "true": True, "false": False, "no limit": -1}
_TASK = re.compile(r"id +(\d+) \| task (\d+) \|(.*)")
_CHOSEN = re.compile(r"id +(\d+) \| task -?\d+ \| selected slot by LCP similarity, (?:f_)?sim_best = ([\d.]+)")
_SLOT_CONTEXT = re.compile(r"n_ctx_slot = (\d+)")
#: a state in the prompt cache, and that the one with most in common is taken
_IN_CACHE = re.compile(r"- prompt with length +(\d+), lcp = +(\d+)")
_TAKEN = "found better prompt with f_keep"
_CHECKPOINT = re.compile(r"(created|restored) context checkpoint .*n_tokens = (\d+)")


class LogError(IsolateError):
    """A log cannot be used: says what is missing in it."""


@dataclass
class Logged:
    """One request, as far as the log tells."""

    slot: int
    #: tokens of the prompt; 0: not said
    count: int = 0
    #: how many of them the slot had already
    shared: int = 0
    #: tokens in the state that came back from the prompt cache first, and how many of them it shares; none: 0, 0
    loaded: tuple[int, int] = (0, 0)
    generated: int = 1
    #: index of the last request that was answered before this one began
    after: int | None = None


@dataclass
class Log:
    """Everything that was read."""

    settings: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    #: positions of one slot; 0: not said
    slot_context: int = 0
    requests: list[Logged] = field(default_factory=list)
    #: ("checkpoint" or "restore", slot, tokens) in order
    states: list[tuple[str, int, int]] = field(default_factory=list)


def read(path: Path) -> Log:
    """Read a log. LogError when it cannot be read or no request is in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise LogError(f"{path}: larger than {MAX_BYTES >> 20} MiB")
    log = _parse(data.decode(errors="replace").splitlines())
    if not log.requests:
        raise LogError(
            f"{path}: no line of it says `processing task`: it is not a llama-server's log, or no request came"
        )
    return log


def _parse(lines: list[str]) -> Log:
    log = Log()
    tasks: dict[int, int] = {}
    alike: dict[int, float] = {}
    released: int | None = None
    kept = loaded = (0, 0)
    for line in lines:
        _setting(log, line)
        if "looking for better prompt" in line:
            kept = (0, 0)
        elif held := _IN_CACHE.search(line):
            kept = max(kept, (int(held[1]), int(held[2])), key=lambda state: state[1])
        elif _TAKEN in line:
            loaded = kept
        if chosen := _CHOSEN.search(line):
            alike[int(chosen[1])] = float(chosen[2])
        said = _TASK.search(line)
        if not said:
            continue
        slot, number, text = int(said[1]), int(said[2]), said[3]
        if "processing task" in text and number not in tasks and len(tasks) < MAX_TASKS:
            tasks[number] = len(log.requests)
            log.requests.append(Logged(slot, after=released))
        if number not in tasks:
            continue
        request = log.requests[tasks[number]]
        if count := re.search(r"task\.n_tokens = (\d+)", text):
            request.count = int(count[1])
            request.shared = round(alike.pop(slot, 0.0) * request.count)
            request.loaded, loaded = loaded, (0, 0)
        elif evaluated := re.search(r"prompt eval time = .*?/ +(\d+) tokens", text):
            request.count = request.count or int(evaluated[1])
        elif generated := re.search(r"(?<!prompt )eval time = .*?/ +(\d+) tokens", text):
            request.generated = max(1, int(generated[1]))
        elif state := _CHECKPOINT.search(text):
            log.states.append(("checkpoint" if state[1] == "created" else "restore", slot, int(state[2])))
        elif "stop processing" in text:
            released = tasks[number]
    return log


def _setting(log: Log, line: str) -> None:
    for name, pattern in _SETTINGS.items():
        if name not in log.settings and (found := re.search(pattern, line)):
            word = found[1]
            log.settings[name] = int(word) if word.isdigit() else _WORDS.get(word, word)
    if found := _SLOT_CONTEXT.search(line):
        log.slot_context = int(found[1])
    for name, words in _OFF.items():
        if words in line:
            log.settings[name] = 0
    if not log.architecture and (
        found := re.search(r"general\.architecture str += (\w[\w-]*)|arch += (\w[\w-]*)", line)
    ):
        log.architecture = found[1] or found[2]


def case_of(log: Log) -> tuple[Case, list[str]]:
    """The case that a log comes to, and everything that had to be assumed. LogError when a server would refuse it."""
    assumed: list[str] = []
    chosen = _options(log, assumed)
    zoo = _model(log, assumed)
    requests = list(_requests(log, assumed))
    steps = list(Server(chosen, Memory.of(ZOO[zoo]), requests).steps())
    assumed += _differences(log, steps)
    about = "\n".join(["Made from a server's log. Assumed:", *assumed])
    return Case(isolate=1, model=Model(zoo=zoo), steps=steps, about=about, context=chosen.context()), assumed


def _options(log: Log, assumed: list[str]) -> Options:
    slots = max((request.slot for request in log.requests), default=0) + 1
    said = {"parallel": slots, **log.settings}
    if log.slot_context and "ctx-size" not in said:
        said["ctx-size"] = log.slot_context * (1 if said.get("kv-unified") else said["parallel"])
    left_out = sorted(set(_SETTINGS) - set(log.settings) - ({"ctx-size"} & said.keys()))
    if left_out:
        assumed.append(f"the log does not say {', '.join(left_out)}: the server's defaults")
    return options(said, "the log")


def _model(log: Log, assumed: list[str]) -> str:
    alike = [name for name, recipe in ZOO.items() if recipe.architecture == log.architecture]
    if alike:
        assumed.append(f"a tiny model of the architecture {log.architecture} instead of the server's")
        return alike[0]
    zoo = "qwen35moe" if log.states else "llama"
    assumed.append(f"the zoo's {zoo} for the model: the log names {log.architecture or 'no architecture'}")
    return zoo


def _requests(log: Log, assumed: list[str]) -> Iterator[Request]:
    held: dict[int, list[int]] = {}
    #: tokens of a slot's prompt and answer together -> the prompts
    states: dict[int, list[list[int]]] = {}
    unknown = 0
    for number, logged in enumerate(log.requests):
        if logged.count > MAX_PROMPT:
            raise LogError(f"a prompt of {logged.count} tokens is more than {MAX_PROMPT}")
        unknown += logged.count == 0
        own = Pattern(max(1, logged.count), 120, 13 * number % 120, 7).tokens()
        before, wanted = held.get(logged.slot, []), logged.shared
        length, common = logged.loaded
        if common:
            # What the slot itself holds is not brought back.
            others = (state for state in reversed(states.get(length, [])) if state != before)
            before, wanted = next(others, []), common
        shared = min(wanted, len(before), len(own))
        if shared < wanted:
            held_by = "a state of the prompt cache" if common else "its slot"
            assumed.append(
                f"request {number} shares {shared} tokens with {held_by}, not {wanted}: those generated are unknown"
            )
        prompt = [*before[:shared], *own[shared:]]
        held[logged.slot] = prompt
        # The token generated last is not decoded.
        states.setdefault(len(prompt) + logged.generated - 1, []).append(prompt)
        yield Request(prompt=prompt, n_predict=logged.generated, slot=logged.slot, after=logged.after)
    assumed.append("tokens of prompts, but for the beginnings that slots were said to share")
    assumed.append("a request arrives as soon as the one answered before it in the log is answered")
    if unknown:
        assumed.append(f"{unknown} prompts of one token: the log does not say how long they were")


def _differences(log: Log, steps: list[Step]) -> list[str]:
    """What the log says of checkpoints and restores, and the case has not, and the other way round."""
    if not log.states:
        return ["which checkpoints were taken and restored: the log names none (they come with -lv 4)"]
    lengths: dict[str, tuple[int, int]] = {}
    ours: Counter[tuple[str, int, int]] = Counter()
    for step in steps:
        if isinstance(step, Checkpoint):
            lengths[step.name] = (step.slot, int(step.name.rpartition("-")[2]))
            ours["checkpoint", lengths[step.name][0], lengths[step.name][1]] += 1
        elif isinstance(step, Restore):
            ours["restore", lengths[step.name][0], lengths[step.name][1]] += 1
    theirs = Counter(log.states)
    said = [
        f"the log has a {kind} of slot {slot} at {count}, the case has not" for kind, slot, count in (theirs - ours)
    ]
    return said + [
        f"the case has a {kind} of slot {slot} at {count}, the log has not" for kind, slot, count in (ours - theirs)
    ]
