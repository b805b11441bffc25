"""A table of treatments: a TOML file that says how a server is started in each row, and what clients ask of it in all.

isolate = 1
model = {zoo = "qwen35moe", type = "Q3_K"}
check = ["logits"]              # oracles to ask after each step, or "all"; none when left out
[server]                        # in every row; names of llama-server's options
ctx-size = 61440
[[rounds]]                      # one request a slot, together, when the last request of the round before is answered
prompt = {count = 1000, stride = 7, modulo = 120}
differ = 13                     # added to `first` from slot to slot
n-predict = 200
[[rows]]
name = "two slots"
set = {parallel = 2}
[[sweeps]]                      # alone, without, all: rows that switch flags one by one, or in all combinations
name = "two slots"
kinds = ["alone", "without", "all"]
set = {parallel = 2}
flags = {cache-prompt = [true, false], ctx-checkpoints = [32, 0]}    # [on, off]
[axes]                          # every row once with each value
cache-type-v = ["q8_0", "turbo4"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from isolate import files
from isolate.case import MAX_CONTEXT, Case, Check, Model, Pattern, Text
from isolate.serve.memory import Memory
from isolate.serve.options import ALIASES, Options, ServeError, options
from isolate.serve.requests import Request
from isolate.serve.slots import Server
from isolate.zoo import ZOO

MAX_ROWS = 4096
MAX_FILE_BYTES = 1 << 20
Value = bool | int | float | str


class Round(Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One request a slot."""

    prompt: Pattern
    n_predict: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)] = 1
    differ: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """One treatment: what it sets besides the table's `server`."""

    name: Annotated[str, Meta(min_length=1, max_length=120)]
    set: dict[str, Value] = {}


class Sweep(Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that switch flags: each alone on, each alone off, all combinations."""

    name: Annotated[str, Meta(min_length=1, max_length=80)]
    #: name of an option -> [on, off]
    flags: Annotated[dict[str, tuple[Value, Value]], Meta(min_length=1, max_length=8)]
    kinds: Annotated[list[Literal["alone", "without", "all"]], Meta(min_length=1)]
    set: dict[str, Value] = {}

    def rows(self) -> Iterator[Row]:
        """The rows it stands for."""
        names = list(self.flags)
        for kind in self.kinds:
            if kind == "all":
                for states in product((True, False), repeat=len(names)):
                    on = " ".join(name for name, state in zip(names, states, strict=True) if state) or "none"
                    yield self._row(f"of all: {on}", dict(zip(names, states, strict=True)))
            else:
                for chosen in names:
                    said = f"{chosen} alone" if kind == "alone" else f"without {chosen}"
                    yield self._row(said, {name: (name == chosen) == (kind == "alone") for name in names})

    def _row(self, said: str, states: dict[str, bool]) -> Row:
        values = {name: self.flags[name][0 if state else 1] for name, state in states.items()}
        return Row(f"{self.name}, {said}", {**self.set, **values})


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file."""

    isolate: Literal[1]
    model: Model
    rounds: Annotated[list[Round], Meta(min_length=1, max_length=64)]
    about: Text = ""
    check: list[Check] | Literal["all"] = []
    server: dict[str, Value] = {}
    rows: list[Row] = []
    sweeps: list[Sweep] = []
    axes: dict[str, Annotated[list[Value], Meta(min_length=1, max_length=64)]] = {}


@dataclass(frozen=True)
class Treatment:
    """A row, ready to run: its options, those of them that the table varies, and the case they come to."""

    name: str
    options: Options
    factors: dict[str, Value]
    case: Case


def read(path: Path) -> list[Treatment]:
    """The treatments of a table. ServeError names the file, the row and the option, and what is allowed."""
    try:
        data = files.read(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ServeError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        table = msgspec.toml.decode(data, type=Table)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = place.rstrip("`").lstrip(".")
        raise ServeError(f"{path}: {f'`{where}`: ' if where else ''}{what[0].lower()}{what[1:]}") from None
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ServeError(f"{path}: not TOML: {error}") from None
    if isinstance(table.model.file, str):
        # The cases go elsewhere than the table.
        table = msgspec.structs.replace(table, model=Model(file=str(path.parent.absolute() / table.model.file)))
    return treatments(table, str(path))


def treatments(table: Table, where: str) -> list[Treatment]:
    """The rows, each with every combination of the axes."""
    plain = [*table.rows, *(row for sweep in table.sweeps for row in sweep.rows())]
    combinations = [dict(zip(table.axes, values, strict=True)) for values in product(*table.axes.values())]
    rows = [_with_axes(row, values) for row in plain for values in combinations]
    if not rows:
        raise ServeError(f"{where}: it has no `rows` and no `sweeps`")
    if len(rows) > MAX_ROWS:
        raise ServeError(f"{where}: {len(rows)} rows are more than {MAX_ROWS}")
    names = [row.name for row in rows]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ServeError(f"{where}: two rows have the name {twice!r}")
    server = _full_names(table.server, f"{where}: `server`")
    settings = [{**server, **_full_names(row.set, f"{where}: row {row.name!r}")} for row in rows]
    chosen = [options(values, f"{where}: row {row.name!r}") for row, values in zip(rows, settings, strict=True)]
    said: list[dict[str, Any]] = [msgspec.to_builtins(each) for each in chosen]
    varied = [name for name in said[0] if len({each[name] for each in said}) > 1]
    return [
        Treatment(row.name, each, {name: values[name] for name in varied}, _case(table, row.name, each))
        for row, each, values in zip(rows, chosen, said, strict=True)
    ]


def _with_axes(row: Row, values: Mapping[str, Value]) -> Row:
    both = ", ".join(f"{name} {value}" for name, value in values.items())
    return Row(f"{row.name}, {both}" if both else row.name, {**row.set, **values})


def _full_names(given: Mapping[str, Value], where: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, value in given.items():
        full = ALIASES.get(name.lstrip("-"), name.lstrip("-"))
        if full in found:
            raise ServeError(f"{where}: `{full}` is given twice (also as `{name}`)")
        found[full] = value
    return found


def _case(table: Table, name: str, chosen: Options) -> Case:
    recipe = ZOO.get(table.model.zoo) if isinstance(table.model.zoo, str) else None
    memory = Memory.of(recipe) if recipe else Memory(partial_removal=False)
    steps = list(Server(chosen, memory, list(requests(table.rounds, chosen.parallel))).steps())
    about = f"{table.about}\n{name}" if table.about else name
    return Case(isolate=1, model=table.model, steps=steps, about=about, context=chosen.context(), check=table.check)


def requests(rounds: list[Round], slots: int) -> Iterator[Request]:
    """The requests of all rounds: a round begins when the last request of the one before is answered."""
    for number, each in enumerate(rounds):
        for slot in range(slots):
            prompt = msgspec.structs.replace(each.prompt, first=each.prompt.first + each.differ * slot)
            yield Request(prompt=prompt, n_predict=each.n_predict, after=number * slots - 1 if number else None)
