"""A finding as one C++ file against llama.h that ends as the finding does: for a debugger, without isolate."""

from __future__ import annotations

import json
from collections.abc import Iterator

from isolate.case import Case
from isolate.fault import Finding
from isolate.report.lowered import Call, Settings, Tokens, calls, model_file, on_a_gpu
from isolate.report.program import program


def text(finding: Finding, case: Case) -> str:
    """The file's text. IsolateError where a program cannot show the fault."""
    made = list(calls(case, finding.fault))
    settings: list[Settings] = []
    for call in made:
        if call.settings is not None and call.settings not in settings:
            settings.append(call.settings)
    values = {
        "API": case.api,
        "LAYERS": str(9999 if on_a_gpu(finding) else 0),
        "SETTINGS": "\n".join(line for number, each in enumerate(settings) for line in _settings(number, each)),
        "CALLS": "\n".join(line for call in made for line in _call(call, settings)),
    }
    return "\n".join(_head(finding, case)) + "\n" + program("program.cpp", "//#", "#include <", 1, values)


def _head(finding: Finding, case: Case) -> Iterator[str]:
    model, command = model_file(case)
    yield f"// {json.dumps(str(finding.fault.signature))}"
    yield f"// {json.dumps(finding.fault.explanation)}"
    yield "//"
    if command:
        yield f"// model:   {command}"
    yield "// compile: g++ -std=c++17 -g -Wall -Wextra -Werror reproducer.cpp -I $LLAMA_INCLUDE -L $LLAMA_LIB"
    yield "//          -Wl,--unresolved-symbols=ignore-in-shared-libs -lllama -lggml -lggml-base -o reproducer"
    yield f"// run:     LD_LIBRARY_PATH=$LLAMA_LIB ./reproducer {model}"
    yield "// Ends with 0 where the fault is gone, with 1 or as the library dies where it is not, with 2 where it cannot be run."


def _call(call: Call, settings: list[Settings]) -> Iterator[str]:
    words = [str(value).lower() for value in call.arguments]
    if call.settings is not None:
        words.append(f"settings_{settings.index(call.settings)}()")
    if call.name == "decode":
        yield f"    decode({', '.join(words)}, {{"
        for run in call.batch:
            yield f"        {{{run.slot}, {run.start}, {_tokens(run)}, {_outputs(run)}}},"
        yield "    });"
    elif call.name == "alone_decode":
        start, position = words
        yield f"    alone_decode({start}, {_tokens(call.batch[0])}, {position});"
    elif call.name == "close":
        yield "    llama_free(context);"
        yield "    llama_model_free(model);"
    else:
        before = ["memory"] if call.name.startswith("llama_memory_") else []
        yield f"    {call.name}({', '.join([*before, *words])});"


def _tokens(run: Tokens) -> str:
    if run.pattern is not None:
        return f"pattern({', '.join(map(str, run.pattern))}, {run.count})"
    return "{GREEDY}" if run.explicit is None else f"{{{', '.join(map(str, run.explicit))}}}"


def _outputs(run: Tokens) -> str:
    if len(run.outputs) > 8 and run.outputs == tuple(range(run.count)):
        return f"all({run.count})"
    return f"{{{', '.join(map(str, run.outputs))}}}"


def _settings(number: int, settings: Settings) -> Iterator[str]:
    yield f"static llama_context_params settings_{number}() {{"
    yield "    llama_context_params params = llama_context_default_params();"
    for name, value in settings.items():
        yield f"    params.{name} = {_value(name, value)};"
    yield "    return params;"
    yield "}\n"


def _value(name: str, value: int | float | bool | str) -> str:
    if name in ("type_k", "type_v"):
        return f"type_called({json.dumps(value)})"
    if isinstance(value, str):
        return f"LLAMA_{name.upper()}_{value.upper()}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value!r}f" if isinstance(value, float) else str(value)
