"""The doctor's screen: what `Library.describe` found, and in one line whether the build can be driven."""

from __future__ import annotations

from typing import Any

_MEBIBYTE = 1 << 20


def text(description: dict[str, Any]) -> str:
    """One screen for a person; `description` is what `Library.describe` returns."""
    build, layouts = description["build"], description["layouts"]
    rows: list[tuple[str, str]] = [
        ("libllama", build["llama"]),
        ("ggml", _names(path.rpartition("/")[2] for path in build["ggml"]) or "inside libllama"),
        ("version", _versions(description["versions"])),
        ("layouts", layouts["source"]),
        ("bytes", _names(f"{name} {size}" for name, size in layouts["bytes"].items())),
        (
            "backends",
            _names(description["backends"]) + (f", loaded from {build['backends']}" if build["backends"] else ""),
        ),
        *(("device", _device(device)) for device in description["devices"]),
        ("KV types", _names(description["kv_types"])),
        *(
            ("has" if there else "has not", what)
            for what, there in sorted(_optional(description).items(), key=_there_first)
        ),
        ("launch hooks", _hooks(description["cuda"])),
        *(("refused", why) for why in layouts["refused"]),
    ]
    return "\n".join([*_aligned(rows), "", verdict(description)])


def verdict(description: dict[str, Any]) -> str:
    """One line: can this build be driven."""
    missing = [what for what, there in _optional(description).items() if not there]
    if not missing:
        return "This build can be driven."
    return f"This build can be driven, without: {'; '.join(missing)}."


def _optional(description: dict[str, Any]) -> dict[str, bool]:
    return {**description["calls"], "checkpoints on the device": "on_device" in description["state_flags"]}


def _there_first(item: tuple[str, bool]) -> bool:
    return not item[1]


def _names(names: Any) -> str:
    return ", ".join(names)


def _versions(versions: dict[str, str | None]) -> str:
    words = {"llama_version": "llama.cpp", "ggml_version": "ggml", "ggml_commit": "commit"}
    return (
        _names(f"{words[name]} {version}" for name, version in versions.items() if version) or "not said by the build"
    )


def _device(device: dict[str, Any]) -> str:
    free, total = (device[key] // _MEBIBYTE for key in ("free_bytes", "total_bytes"))
    return f"{device['name']} ({device['type']}): {device['description']}, {free} of {total} MiB free"


def _hooks(cuda: dict[str, Any] | None) -> str:
    if cuda is None:
        return "nothing to attach to, this build has no CUDA backend"
    if cuda["runtime"] is None:
        return f"cannot attach: {cuda['library']} has the CUDA runtime linked in; build with -DGGML_STATIC=OFF and a shared cudart"
    return f"can attach: {cuda['library']} asks for {cuda['runtime']}"


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    lines, before = [], ""
    for label, value in rows:
        lines.append(f"{'' if label == before else label:<13} {value}")
        before = label
    return lines
