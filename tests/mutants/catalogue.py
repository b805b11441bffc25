"""All planted faults, by name."""

from __future__ import annotations

import inspect

from tests.mutants import computing, memory, states
from tests.mutants.layer import Faulty

MUTANTS: dict[str, type[Faulty]] = {
    name: found
    for module in (states, memory, computing)
    for name, found in vars(module).items()
    if inspect.isclass(found) and issubclass(found, Faulty) and found is not Faulty
}
