"""Chance that is spread evenly: what successive shares of a campaign draw fills what there is to choose from without gaps."""

from __future__ import annotations

from random import Random
from typing import Any

#: How far the place of a share moves each of its draws around the circle: the golden ratio and roots of primes but 5, which
#: never come round, together neither (additive recurrence, a low-discrepancy sequence). A ground takes at most as many draws.
_STEPS = (0.6180339887, 0.3851648071, 0.7320508076, 0.4142135624, 0.6457513111, 0.3166247904, 0.6055512755, 0.1231056256,
          0.3588989435, 0.7958315233, 0.5677643628, 0.0827625303)  # fmt: skip


class Even(Random):
    """The draws of share `place` of the campaign with this seed; the first draw of one is far from the first of the next."""

    def __new__(cls, seed: int, place: int) -> Even:
        # Random itself takes one argument before Python 3.11.
        return super().__new__(cls)

    def __init__(self, seed: int, place: int) -> None:
        super().__init__(f"{seed}:even")
        self.place = place
        self.draws = 0

    def random(self) -> float:
        """The next draw, from 0 to 1."""
        step = _STEPS[self.draws % len(_STEPS)]
        self.draws += 1
        return (super().random() + self.place * step) % 1.0

    def choice(self, seq: Any) -> Any:
        """One of a sequence; like draws choose like places in it, as Random's own does not."""
        return seq[int(self.random() * len(seq))]
