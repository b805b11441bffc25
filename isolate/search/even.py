"""Chance that is spread evenly: what successive shares of a campaign draw fills what there is to choose from without gaps."""

from __future__ import annotations

from random import Random
from typing import Any

#: One for each draw of a ground. In the bases of different primes no two draws follow each other (Halton sequence).
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_FINE = 1e-9


class Even(Random):
    """The draws of share `place` of the campaign with this seed: digits of the place, turned round and mixed by the seed.

    Mixed, since large bases are alike for as many places as they have digits (A. Owen, A randomized Halton algorithm in R).
    """

    def __new__(cls, seed: int, place: int) -> Even:
        # Random itself takes one argument before Python 3.11.
        return super().__new__(cls)

    def __init__(self, seed: int, place: int) -> None:
        super().__init__()
        self.mixing = seed
        self.place = place
        self.draws = 0

    def random(self) -> float:
        """The next draw, from 0 to 1."""
        base, mixing = _BASES[self.draws % len(_BASES)], Random(f"{self.mixing}:even:{self.draws}")
        self.draws += 1
        drawn, rest, scale = 0.0, self.place, 1.0
        while scale > _FINE:
            scale /= base
            drawn += scale * mixing.sample(range(base), base)[rest % base]
            rest //= base
        return drawn

    def choice(self, seq: Any) -> Any:
        """One of a sequence; like draws choose like places in it, as Random's own does not."""
        return seq[int(self.random() * len(seq))]
