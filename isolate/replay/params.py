"""A child that says what a program asked for when it made a context: `python -m isolate.replay.params BUILD HEX [BEFORE...]`.

The bytes of a llama_context_params mean something only by the layout of the build they were made for, which is
established by loading it, after the libraries BEFORE. One JSON line is the answer: the settings by their names in a case, or the error.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from isolate.case import Context
from isolate.errors import IsolateError
from isolate.library.bind import Library
from isolate.library.find import find_build


def settings(library: Library, raw: bytes) -> dict[str, Any]:
    """The fields that a case's context has, from the bytes of the struct; what the build does not have is left out."""
    kind = library.layout.structs["llama_context_params"]
    params = kind.from_buffer_copy(raw.ljust(ctypes.sizeof(kind), b"\0"))
    fields = {field.name: field for field in library.layout.fields["llama_context_params"]}
    types = {number: name for name, number in library.kv_types.items()}
    default = library.context_params()
    found: dict[str, Any] = {}
    for name in Context.__struct_fields__:
        if name not in fields:
            continue
        value = getattr(params, name)
        always = name in Context().settings()
        if not always and value == getattr(default, name):
            continue
        enum = fields[name].enum
        if enum == "ggml_type":
            value = types.get(value, str(value))
        elif enum is not None:
            names = library.layout.enums.get(enum, {})
            prefix = f"{enum.upper()}_"
            value = next((key.removeprefix(prefix).lower() for key, number in names.items() if number == value), value)
        found[name] = value
    return found


def main() -> None:
    """Answer for the build and the bytes given as arguments."""
    build, raw, *before = sys.argv[1:]
    try:
        answer: dict[str, Any] = {
            "settings": settings(
                Library(find_build(build or None), [Path(path) for path in before]), bytes.fromhex(raw)
            )
        }
    except IsolateError as error:
        answer = {"error": error.message}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
