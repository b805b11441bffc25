"""The parts of a printed program: only those that are called, directly or by another part, in the order of their file.

A part begins with a line that names what it defines: `//# open(`. `head` and `main` are in every program. Lines that include or
import something are put where the head says `$IMPORTS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def program(file: str, mark: str, imports: str, apart: int, values: Mapping[str, str]) -> str:
    """The program of the parts in `file`, with each `$NAME` replaced by its value."""
    text = Path(__file__).with_name(file).read_text()
    found = re.split(rf"^{re.escape(mark)} (.*)\n", text, flags=re.MULTILINE)[1:]
    chosen: list[str] = []
    for defines, part in reversed(list(zip(found[::2], found[1::2], strict=True))):
        if defines in ("head", "main") or any(_stands_in(name, chosen) for name in defines.split()):
            chosen.append(re.sub(r"\$([A-Z]+)", lambda match: values.get(match[1], match[0]), part))
    lines = "".join(reversed(chosen)).split("\n")
    asked = sorted({line for line in lines if line.startswith(imports)})
    kept = "\n".join(line for line in lines if not line.startswith(imports))
    # where lines were taken away, empty ones remain: `apart` of them stand between two parts
    spaced = re.sub(rf"\n{{{apart + 2},}}", "\n" * (apart + 1), kept)
    return spaced.replace("$IMPORTS", "\n".join(asked), 1).rstrip("\n") + "\n"


def _stands_in(name: str, texts: list[str]) -> bool:
    word = re.compile(rf"(?<!\w){re.escape(name)}" + ("" if name.endswith("(") else r"(?!\w)"))
    return any(word.search(text) for text in texts)
