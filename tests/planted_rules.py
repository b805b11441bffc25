"""Invented faults: what a broken library would need to fail, as rules over a case, and the least that keeps each.

A rule sees the steps as a library would: calls in their order, tokens, slots, settings. `START` has all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isolate.case import (
    Case,
    Checkpoint,
    Context,
    Decode,
    Load,
    Model,
    Pattern,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)


def start(seed: int = 1, rounds: int = 12) -> Case:
    """A server's run over three slots with everything in it."""
    chance = random.Random(seed)
    steps: list[Step] = [
        Decode(batch=[Run(slot, Pattern(120 + 100 * slot, 100, first=slot, stride=7)) for slot in range(3)]),
    ]
    for number in range(rounds):
        slot = number % 3
        steps += [
            Checkpoint(slot=slot, name=f"point-{number}"),
            Decode(batch=[Run(other, Pattern(1 + chance.randrange(40), 100, stride=3)) for other in range(3)]),
            Save(slot=(slot + 1) % 3, name=f"state-{number}"),
            SeqRm(slot=slot, p0=60),
            Restore(name=f"point-{number}"),
            Decode(batch=[Run(slot, Pattern(2 + chance.randrange(20), 100), "all")]),
            SeqAdd(slot=slot, p0=10, delta=3),
            Load(name=f"state-{number}"),
            SeqCp(slot=slot, into=(slot + 2) % 3, p0=0, p1=40),
        ]
    steps += [
        SeqKeep(slot=1),
        Decode(batch=[Run(0, Pattern(200, 100)), Run(1, Pattern(300, 100)), Run(2, Pattern(7, 100))]),
    ]
    context = Context(n_ctx=61440, n_batch=1024, n_ubatch=128, n_seq_max=4, type_k="q8_0", type_v="q8_0")
    return Case(isolate=1, model=Model(zoo="qwen35moe", type="Q3_K", seed=3), steps=steps, context=context)


def _batches(case: Case) -> Iterator[dict[int, int]]:
    for step in case.steps:
        if isinstance(step, Decode):
            yield step.tokens_by_slot()


def _decodes(case: Case) -> bool:
    return any(_batches(case))


def _in_order(case: Case, *wanted: Callable[[Step], bool]) -> bool:
    """Steps that satisfy these, one after the other, with anything between."""
    steps = iter(case.steps)
    return all(any(test(step) for step in steps) for test in wanted)


def _kind(name: str) -> Callable[[Step], bool]:
    return lambda step: step.kind == name


@dataclass(frozen=True)
class Rule:
    """A fault and the least that keeps it."""

    name: str
    holds: Callable[[Case], bool]
    steps: int
    tokens: int


def _over(case: Case, least: int) -> bool:
    total = 0
    for batch in _batches(case):
        total += batch.get(0, 0)
    return total > least


RULES = (
    Rule("six to eight tokens", lambda case: any(6 <= sum(b.values()) <= 8 or sum(b.values()) > 400 for b in _batches(case)), 1, 6),
    Rule("a batch of more than 100", lambda case: any(sum(b.values()) > 100 for b in _batches(case)), 1, 101),
    Rule("two slots in a batch", lambda case: any(len(b) >= 2 for b in _batches(case)), 1, 2),
    Rule("five tokens of slot 1", lambda case: any(b.get(1, 0) >= 5 for b in _batches(case)), 1, 5),
    Rule("a long and a short run", lambda case: any(len(b) > 1 and max(b.values()) >= 20 and min(b.values()) <= 8 for b in _batches(case)), 1, 21),
    Rule("restore, then decode", lambda case: _in_order(case, _kind("restore"), _kind("decode")), 3, 1),
    Rule("restore after a removal", lambda case: _in_order(case, _kind("seq_rm"), _kind("restore")), 3, 0),
    Rule("load after a shift", lambda case: _in_order(case, _kind("seq_add"), _kind("load")), 3, 0),
    Rule("copy, then keep", lambda case: _in_order(case, _kind("seq_cp"), _kind("seq_keep")), 2, 0),
    Rule("two restores", lambda case: _in_order(case, _kind("restore"), _kind("restore")), 3, 0),
    Rule("shift of a decoded slot", lambda case: _in_order(case, _kind("decode"), _kind("seq_add"), _kind("decode")), 3, 2),
    Rule("checkpoint, save, restore, load", lambda case: _in_order(case, *map(_kind, ("checkpoint", "save", "restore", "load"))), 4, 0),
    Rule("slot 0 over 150 tokens", lambda case: _over(case, 150), 1, 151),
    Rule("three decodes", lambda case: sum(1 for _ in _batches(case)) >= 3, 3, 3),
    Rule("q8_0 cache", lambda case: _decodes(case) and case.context.type_k == "q8_0", 1, 1),
    Rule("n_ubatch below the batch", lambda case: any(sum(b.values()) > case.context.n_ubatch for b in _batches(case)), 1, 129),
    Rule("a quantized mixture of experts", lambda case: _decodes(case) and case.model.type == "Q3_K" and "moe" in str(case.model.zoo), 1, 1),
    Rule("four slots", lambda case: _decodes(case) and case.context.n_seq_max >= 4, 1, 1),
    Rule("logits of all", lambda case: any(run.logits == "all" for s in case.steps if isinstance(s, Decode) for run in s.batch), 1, 1),
    Rule("removal, shift, removal", lambda case: _in_order(case, *map(_kind, ("seq_rm", "seq_add", "seq_rm"))), 3, 0),
)  # fmt: skip
