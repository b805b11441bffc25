"""What `isolate doctor` found, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH = 110
LABEL = 12


def text(found: dict[str, Any]) -> str:
    """The build, its layouts, devices, KV types, optional calls, hooks and GPUs, and whether it can be driven."""
    return "\n".join(_lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    build, versions, layouts = found["build"], found["versions"], found["layouts"]
    yield from _entry("build", build["llama"])
    yield from _entry("", "with " + ", ".join(Path(path).name for path in build["ggml"]))
    if build["backends"]:
        yield from _entry("", f"and the backends in {build['backends']}")
    yield from _entry(
        "version", ", ".join(f"{name.replace('_', ' ')} {value or 'not told'}" for name, value in versions.items())
    )
    yield from _entry("layouts", layouts["source"])
    sizes = ", ".join(f"{name} {size}" for name, size in layouts["bytes"].items())
    yield from _entry("", f"bytes without tail padding: {sizes}")
    for refused in layouts["refused"]:
        yield from _entry("", f"not settable: {refused}")
    yield from _entry("backends", ", ".join(found["backends"]) or "none")
    for device in found["devices"]:
        memory = f"{device['free_bytes'] / 2**30:.1f} of {device['total_bytes'] / 2**30:.1f} GiB free"
        yield from _entry("device", f"{device['name']} ({device['description']}), {memory}")
    yield from _entry("KV types", ", ".join(found["kv_types"]))
    yield from _entry("state flags", ", ".join(found["state_flags"]))
    for name, there in found["calls"].items():
        yield from _entry(
            "calls" if name == next(iter(found["calls"])) else "", f"{'yes' if there else 'no ':<4}{name}"
        )
    yield from _entry("hooks", found["hooks"])
    yield from _entry("GPUs", found["driver"])
    for gpu in found["gpus"]:
        capability = f"compute capability {gpu['capability'] // 10}.{gpu['capability'] % 10}"
        yield from _entry("", f"{gpu['name']}, {capability}, {gpu['memory_mib'] / 1024:.0f} GiB")
    yield from _entry("verdict", "this build can be driven")


def _entry(label: str, value: str) -> Iterator[str]:
    lines = textwrap.wrap(value, WIDTH - LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        yield f"{label if number == 0 else '':<{LABEL}}{line}"
