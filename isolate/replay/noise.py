"""How far logits move by rounding alone, and how far by another prefix: what a difference is measured against.

Measured on the model and settings in use, in a context with one slot; distances are normalized mean squared errors (NMSE) of
a row of logits. Signal is the same last tokens after another prefix. Noise is the same tokens in batches of other sizes
(`shape`) and from other first positions (`moved`). A rounding that tips over in a quantized cache or weight is rare and then
stays, so a sample of shapes may miss it; what all of them do when they tip over together, by moving, bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from isolate.replay.alone import Logits, Single

#: Noise and signal are told apart when this far from each other.
SEPARATED = 100.0

#: Rounding of an F32 sum: no measured noise is taken to be less.
_LEAST = 1e-13
_PREFIX = 40
_AFTER = 16
_STREAMS = 2
_NUDGES = (1, 6)
#: What the few roundings of a quantized cache that tip over do: this share of what moving does, but never more than this
#: share of the signal. A sixth of either was seen.
_TIPPED, _TIPPED_MOST = 1 / 30, 1 / 200
#: Activations that meet quantized weights are rounded to 8 bits: models of the zoo differ by up to this share of the signal.
_ROUGH_WEIGHTS = 1 / 500


@dataclass(frozen=True)
class Noise:
    """What was measured on a model and its settings, the worst of each."""

    shape: float
    #: of a slot whose keys are where they were written
    still: float
    #: of a slot that was moved
    moved: float
    signal: float

    def level(self, moved: bool) -> float:
        """The noise to expect of a slot."""
        return self.moved if moved else self.still

    def separated(self, moved: bool) -> bool:
        """A difference between noise and signal can be judged."""
        return self.signal >= SEPARATED * self.level(moved)

    def tolerance(self, moved: bool) -> float:
        """The largest distance that counts as rounding. Up to 3 times the level was seen, and 25 times the sample's `shape`."""
        return min(max(10 * self.level(moved), 100 * self.shape), self.signal / 30)


def distance(right: Logits, row: Logits) -> float:
    """NMSE of a row of logits from the right one; the largest number where either is not finite."""
    one, other = right.astype(np.float64), row.astype(np.float64)
    power, error = float(np.dot(one, one)), one - other
    found = float(np.dot(error, error)) / power if power > 0 else float(np.any(error))
    return found if np.isfinite(found) else float(np.finfo(np.float64).max)


def measure(context: Single, room: int, relative: bool = True, weights: bool = True, cache: bool = True) -> Noise:
    """Measure in an empty context that has `room` positions.

    `relative`: the model knows only distances of positions, so that moving leaves its logits. `weights`, `cache`: they hold
    floating point numbers.
    """
    length = min(_PREFIX + _AFTER, room)
    prefix = length * _PREFIX // (_PREFIX + _AFTER)
    shape, nudged, far, signal = _LEAST, 0.0, 0.0, float("inf")
    for stream in range(_STREAMS):
        tokens = _tokens(context, 2 * stream, length)
        right = _rows(context, tokens, [length], 0)
        for parts in ([1] * length, [length // 2, length - length // 2], _uneven(length)):
            shape = max(shape, *map(distance, right, _rows(context, tokens, parts, 0)))
        if relative:
            for start in _NUDGES:
                nudged = max(nudged, *map(distance, right, _rows(context, tokens, [length], start)))
            far = max(far, *map(distance, right, _rows(context, tokens, [length], max(room - length, 1))))
        swapped = [*_tokens(context, 2 * stream + 1, prefix), *tokens[prefix:]]
        signal = min(signal, *map(distance, right[prefix:], _rows(context, swapped, [length], 0)[prefix:]))
    context.forget()
    if not relative:
        # nothing tells how far the sample is from the worst
        nudged = 3 * shape
    still = max(shape, nudged if cache else min(nudged * _TIPPED, signal * _TIPPED_MOST))
    if not weights:
        still = max(still, signal * _ROUGH_WEIGHTS)
    return Noise(shape, still, max(still, nudged, far), signal)


def _tokens(context: Single, stream: int, count: int) -> list[int]:
    """Tokens without a pattern, the same every time."""
    raw = np.random.Philox(key=stream).random_raw(count)
    return [int(bits) % context.vocabulary for bits in raw]


def _uneven(length: int) -> list[int]:
    """A length in parts of all sorts."""
    parts: list[int] = []
    for part in chain.from_iterable([(5, 8, 3, 16)] * length):
        if sum(parts) + part >= length:
            break
        parts.append(part)
    return [*parts, length - sum(parts)]


def _rows(context: Single, tokens: Sequence[int], parts: Sequence[int], start: int) -> list[Logits]:
    context.forget()
    found: dict[int, Logits] = {}
    at = 0
    for count in parts:
        wanted = set(range(start + at, start + at + count))
        found |= context.decode(tokens[at : at + count], start + at, wanted)
        at += count
    return [found[start + index] for index in range(len(tokens))]
