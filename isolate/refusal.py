"""Say what msgspec refused in a person's words: the step, the field, and what is allowed there."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect


def sentence(error: msgspec.ValidationError, data: bytes, whole: type) -> str:
    """Turn "<what> - at `$.steps[3].batch[0].slot`" into "step 3, field `batch[0].slot`: <what>; allowed: ..."."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if path.startswith("steps["):
        number, _, field = path[len("steps[") :].partition("]")
        place = f"step {number}" + (f", field `{field.lstrip('.')}`" if field else "")
    else:
        place = f"field `{path}`" if path else "the file"
    return f"{place}: {what[0].lower()}{what[1:]}{_allowed(what, data, path, whole)}"


def _allowed(what: str, data: bytes, path: str, whole: type) -> str:
    if not what.startswith(("Invalid enum value", "Invalid value", "Object contains unknown field")):
        return ""
    if not re.fullmatch(r"(\w+|\[\d+\]|\.)*", path):
        return ""  # a field of the file is named like a path
    value: Any = msgspec.json.decode(data)
    options = _options(inspect.type_info(whole))
    for key in re.findall(r"[^.\[\]]+", path):
        if path.endswith(".step") and key == "step":
            break
        inner: list[inspect.Type] = []
        for option in _fitting(options, value):
            if isinstance(option, inspect.ListType) and key.isdigit():
                inner += _options(option.item_type)
            elif isinstance(option, inspect.StructType):
                inner += [kind for field in option.fields if field.encode_name == key for kind in _options(field.type)]
        options = inner
        value = value[int(key)] if isinstance(value, list) else value[key]
    return "; allowed: " + ", ".join(_names(what, path, _fitting(options, value)))


def _options(kind: inspect.Type) -> list[inspect.Type]:
    """The alternatives of a type, without wrappers."""
    if isinstance(kind, inspect.UnionType):
        return [option for part in kind.types for option in _options(part)]
    return _options(kind.type) if isinstance(kind, inspect.Metadata) else [kind]


def _fitting(options: list[inspect.Type], value: object) -> list[inspect.Type]:
    """Of several tagged structs, the one whose tag the value has."""
    if not isinstance(value, dict):
        return options
    tagged: list[inspect.Type] = [
        o for o in options if isinstance(o, inspect.StructType) and o.tag_field and value.get(o.tag_field) == o.tag
    ]
    return tagged or options


def _names(what: str, path: str, options: list[inspect.Type]) -> list[str]:
    structs = [option for option in options if isinstance(option, inspect.StructType)]
    if path.endswith(".step"):
        return sorted(str(option.tag) for option in structs)
    if "unknown field" in what:
        tags = {str(option.tag_field) for option in structs if option.tag_field}
        return sorted(tags | {field.encode_name for option in structs for field in option.fields})
    return [str(value) for option in options if isinstance(option, inspect.LiteralType) for value in option.values]
