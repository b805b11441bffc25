"""Leaks and slow paths: what only the counts of many steps show.

A leak: a schedule of steps comes again and again, the slots hold the same after each round, and what is in use climbs
all the same. A slow path: the same rows took twice the ubatches, or launches, in other slots or in another order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec import UnsetType

from isolate.case import Checkpoint, Context, Decode, Reopen, Save, SeqAdd, SeqCp, Step
from isolate.fault import Call, Fault, Signature, StepInFlight

#: Counted over a step.
WORK = ("ubatches", "launches", "graph launches")
#: In use after a step, and what of it leaks. Those that are exact are a leak when they climb in every round.
EXACT = ("state bytes", "allocations", "allocated bytes", "CUDA graphs")
#: Those that others use too, or that come in pages, must climb by so many bytes (900 steps of a right library: 0.1 MiB).
COARSE = {"device bytes": 64 << 20, "resident bytes": 16 << 20}
HELD = (*EXACT, *COARSE)
_TOLD = {
    "state bytes": "the state of all slots grows",
    "allocations": "the number of CUDA allocations grows",
    "allocated bytes": "allocated CUDA memory grows",
    "CUDA graphs": "the number of CUDA graphs grows",
    "device bytes": "the device's memory in use grows",
    "resident bytes": "resident memory grows",
}
#: The first rounds fill pools and caches; from the second on nothing may climb.
WARM_UP = 2
ROUNDS, COARSE_ROUNDS = 4, 12
LONGEST_ROUND = 64
#: A cache is padded to so many cells (llama-kv-cache.cpp), which decides what is launched.
PADDING = 256
SLOW = 2


@dataclass(frozen=True)
class Fill:
    """What is held: cells by slot, of all layers and of those with a window, and bytes of the states that the case keeps."""

    cells: tuple[int, ...]
    window: tuple[int, ...]
    kept: int


@dataclass(frozen=True)
class Sample:
    """What one step did and left."""

    index: int
    step: Step
    #: as it should be; None where that is not known
    fill: Fill | None
    #: by names of WORK
    work: dict[str, int]
    #: by names of HELD
    held: dict[str, int]


@dataclass(frozen=True)
class Rounds:
    """Steps that come again and again: `count` rounds of `length` samples from `start` on."""

    start: int
    length: int
    count: int

    def ends(self) -> list[int]:
        """The last sample of each round after those of the warm-up, and of the last of those."""
        return [self.start + self.length * (number + 1) - 1 for number in range(WARM_UP - 1, self.count)]

    def until(self, step: int) -> Rounds:
        """The rounds that end with this step of a round, counted from 0."""
        left_over = step + 1
        count = self.count if left_over == self.length else self.count - 1
        return Rounds(self.start + left_over % self.length, self.length, count)


def fault(samples: Sequence[Sample]) -> Fault | None:
    """The first leak, else the first slow path."""
    return leak(samples) or slow(samples)


# -- leak


def leak(samples: Sequence[Sample]) -> Fault | None:
    """What climbs over rounds that are all the same."""
    for rounds in repeated(_shapes([sample.step for sample in samples])):
        name = _leaking(samples, rounds)
        if name:
            # Rounds that end with the step that leaks, where there are enough: a case is cut behind the step of its fault.
            shorter = rounds.until(_worst(samples, rounds, name))
            enough = shorter.count >= ROUNDS and _leaking(samples, shorter) == name
            return _leak(samples, shorter if enough else rounds, name)
    return None


def repeats(steps: Sequence[Step]) -> bool:
    """There are rounds among these steps over which something can be seen to climb."""
    return next(repeated(_shapes(steps)), None) is not None


def _shapes(steps: Sequence[Step]) -> list[int]:
    """A number for each step, the same for those of one shape."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(_shape(step), len(numbers)) for step in steps]


def _leaking(samples: Sequence[Sample], rounds: Rounds) -> str:
    """What climbs although the slots hold the same after each round; "" where nothing does."""
    ends = [samples[at] for at in rounds.ends()]
    if ends[0].fill is None or any(end.fill != ends[0].fill for end in ends):
        return ""
    for name in ends[0].held:
        values = [end.held[name] for end in ends]
        if _climbs(values) if name in EXACT else _climbs_by(values, COARSE[name]):
            return name
    return ""


def _climbs(values: Sequence[int]) -> bool:
    return all(earlier < later for earlier, later in pairwise(values))


def _climbs_by(values: Sequence[int], much: int) -> bool:
    """Steadily: never down, and in each half by half of that at least."""
    middle = len(values) // 2
    halves = (values[middle] - values[0], values[-1] - values[middle])
    return len(values) > COARSE_ROUNDS - WARM_UP and values == sorted(values) and min(halves) >= much // 2


def repeated(shapes: Sequence[int]) -> Iterator[Rounds]:
    """Where at least ROUNDS rounds of the same steps follow each other; the shortest rounds first."""
    for length in range(1, min(LONGEST_ROUND, len(shapes) // ROUNDS) + 1):
        same = 0
        for at in range(length, len(shapes) + 1):
            if at < len(shapes) and shapes[at] == shapes[at - length]:
                same += 1
                continue
            count = same // length + 1
            if count >= ROUNDS:
                # What is left over was at the beginning: rounds are counted back from where they end.
                yield Rounds(at - count * length, length, count)
            same = 0


def _shape(step: Step) -> object:
    """What of a step makes it the same again: not which tokens, positions and names."""
    match step:
        case Decode():
            return "decode", tuple((run.slot, run.count(), len(run.outputs())) for run in step.batch)
        case Checkpoint() | Save():
            return step.kind, step.slot
        case SeqCp():
            return step.kind, step.slot, step.into
        case Reopen():
            return step.kind, step.context
        case _:
            return step.kind, getattr(step, "slot", None)


def _leak(samples: Sequence[Sample], rounds: Rounds, name: str) -> Fault:
    ends = [samples[at] for at in rounds.ends()]
    last, fill = ends[-1], ends[0].fill
    assert fill is not None
    climb = (last.held[name] - ends[0].held[name]) // (len(ends) - 1)
    steps = f"{rounds.length} step{'s' if rounds.length > 1 else ''}"
    by = f"{climb} bytes" if name.endswith("bytes") else f"{climb}"
    cell = _bytes_a_cell(samples) if name == "state bytes" else 0
    if cell and climb % cell == 0:
        by += f" ({climb // cell} cell{'s' if climb > cell else ''})"
    said = (
        f"{_TOLD[name]} by {by} a round, over {rounds.count} equal rounds "
        f"of {steps} from step {samples[rounds.start].index} on, after each of which the slots should hold the same"
    )
    evidence = {
        "cells_by_slot": {str(slot): cells for slot, cells in enumerate(fill.cells) if cells},
        "after_each_round": {key: [end.held[key] for end in ends] for key in ends[0].held},
    }
    return _fault("leak", last, name, said, evidence)


def _worst(samples: Sequence[Sample], rounds: Rounds, name: str) -> int:
    """Which step of a round adds most after the warm-up, beyond the cells it should."""
    first = rounds.start + rounds.length * WARM_UP
    cell = _bytes_a_cell(samples) if name == "state bytes" else 0
    changes = [0] * rounds.length
    for at in range(first, rounds.start + rounds.length * rounds.count):
        before, after = samples[at - 1], samples[at]
        change = after.held[name] - before.held[name]
        if before.fill and after.fill:
            change -= cell * (sum(after.fill.cells) - sum(before.fill.cells))
        changes[(at - first) % rounds.length] += change
    return max(range(rounds.length), key=changes.__getitem__)


def _bytes_a_cell(samples: Sequence[Sample]) -> int:
    """Most decodes into slots that are in use already say it."""
    found: Counter[int] = Counter()
    for before, after in pairwise(samples):
        if isinstance(after.step, Decode) and before.fill and after.fill:
            tokens = sum(after.fill.cells) - sum(before.fill.cells)
            grown = after.held["state bytes"] - before.held["state bytes"]
            if tokens > 0 and grown % tokens == 0 and all(_cells(before.fill, run.slot) for run in after.step.batch):
                found[grown // tokens] += 1
    return found.most_common(1)[0][0] if found else 0


# -- slow path


@dataclass(frozen=True)
class _Way:
    """The rows of one decode in the slots they were in."""

    slots: tuple[int, ...]
    sample: Sample


def slow(samples: Sequence[Sample]) -> Fault | None:
    """Rows that took twice the work in some slots that they took in others."""
    ways: dict[object, dict[tuple[int, ...], dict[str, Sample]]] = defaultdict(dict)
    for rows, slots, sample in _decodes(samples):
        least = ways[rows].setdefault(slots, {})
        for name in ("ubatches", "launches"):
            # What a CUDA graph launches, and what is captured for one, is not told apart here.
            if name == "launches" and sample.work["graph launches"]:
                continue
            if name not in least or sample.work[name] < least[name].work[name]:
                least[name] = sample
    for name in ("ubatches", "launches"):
        for by_slots in ways.values():
            found = [_Way(slots, least[name]) for slots, least in by_slots.items() if name in least]
            if len(found) < SLOW:
                continue
            best = min(found, key=lambda way: way.sample.work[name])
            worst = max(found, key=lambda way: way.sample.work[name])
            if 0 < SLOW * best.sample.work[name] <= worst.sample.work[name]:
                return _slow(name, worst, best, [way for way in found if way not in (worst, best)])
    return None


def _decodes(samples: Sequence[Sample]) -> Iterator[tuple[object, tuple[int, ...], Sample]]:
    """Each decode that can be compared: settings and rows whatever slots they are in, and the slots in their order."""
    pending = False
    context: Context | None = None
    for sample in samples:
        step, fill = sample.step, sample.fill
        if isinstance(step, Reopen):
            context = step.context
        elif isinstance(step, SeqAdd | SeqCp):
            # Carried out by the next decode, as a graph of its own.
            pending = True
        elif isinstance(step, Decode):
            if fill is not None and not pending and isinstance(step.returns, UnsetType):
                rows = sorted((run.count(), len(run.outputs()), _padded(_cells(fill, run.slot))) for run in step.batch)
                yield (context, tuple(rows), _padded(sum(fill.cells))), tuple(run.slot for run in step.batch), sample
            pending = False


def _cells(fill: Fill, slot: int) -> int:
    return fill.cells[slot] if 0 <= slot < len(fill.cells) else 0


def _padded(cells: int) -> int:
    return -(-cells // PADDING)


def _slow(name: str, worst: _Way, best: _Way, others: list[_Way]) -> Fault:
    def told(way: _Way) -> str:
        work = way.sample.work
        launches = f" and {work['launches']} launches" if work["launches"] else ""
        ubatches = f"{work['ubatches']} ubatch{'es' if work['ubatches'] != 1 else ''}"
        return f"{ubatches}{launches} in slots {', '.join(map(str, way.slots))} (step {way.sample.index})"

    said = f"the same rows took {told(worst)}, and {told(best)}"
    evidence = {"ways": [told(way) for way in (best, *others, worst)]}
    # Where both are known: up to there a case must be kept.
    later = max(worst.sample, best.sample, key=lambda sample: sample.index)
    return _fault("slow", later, name, said, evidence)


def _fault(kind: str, sample: Sample, where: str, said: str, evidence: dict[str, Any]) -> Fault:
    in_flight = StepInFlight(sample.index, sample.step.kind, sample.step.tokens_by_slot())
    call = Call(_CALLS.get(sample.step.kind, f"llama_memory_{sample.step.kind}"), None, said)
    return Fault(kind, Signature(kind, where, None, sample.step.kind), in_flight, call, call, said, evidence=evidence)


_CALLS = {
    "decode": "llama_decode",
    "checkpoint": "llama_state_seq_get_data_ext",
    "save": "llama_state_seq_get_data_ext",
    "restore": "llama_state_seq_set_data_ext",
    "load": "llama_state_seq_set_data_ext",
    "context": "llama_init_from_model",
}
