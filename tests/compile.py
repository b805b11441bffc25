"""Builds the C programs of tests/native for the tests, with or without a sanitizer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CC", "cc")


def build(output: Path, sources: Sequence[str], *flags: str) -> Path:
    """Compiles sources (relative to the checkout) to a program or, with -shared, a library."""
    command = [COMPILER, "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'native'}"]
    command += [*(str(ROOT / source) for source in sources), "-o", str(output), *flags, "-pthread", "-ldl"]
    subprocess.run(command, check=True)
    return output
