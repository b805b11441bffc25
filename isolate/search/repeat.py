"""Does a fault that comes and goes still come? A sequential test answers with as few runs as the answers allow.

Wald's sequential probability ratio test: is the rate at least that of the case it began with, or less than a third of it?
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: How often the test may be wrong, either way.
RISK = 0.05
#: A case whose fault comes this much more rarely is another case.
RARER = 3.0
MOST = 60


def still_comes(rate: float, comes: Callable[[], bool]) -> bool:
    """Ask `comes` until it is decided; one answer decides for a fault that came every time (rate 1)."""
    if rate >= 1:
        return comes()
    expected, rare = min(rate, 0.95), min(rate, 0.95) / RARER
    hit, miss = math.log(expected / rare), math.log((1 - expected) / (1 - rare))
    accept, refuse = math.log((1 - RISK) / RISK), math.log(RISK / (1 - RISK))
    weight = 0.0
    for _ in range(MOST):
        weight += hit if comes() else miss
        if weight >= accept:
            return True
        if weight <= refuse:
            return False
    return False
