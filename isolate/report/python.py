"""A finding as one Python file that makes the calls through llama-cpp-python's own bindings, without isolate."""

from __future__ import annotations

import json
from collections.abc import Iterator

from isolate.case import Case
from isolate.fault import Finding
from isolate.report.lowered import Call, Settings, Tokens, calls, model_file, on_a_gpu
from isolate.report.program import program


def text(finding: Finding, case: Case) -> str:
    """The file's text. IsolateError where a program cannot show the fault."""
    values = {
        "API": case.api,
        "LAYERS": str(9999 if on_a_gpu(finding) else 0),
        "CALLS": "\n".join(_call(call) for call in calls(case, finding.fault)),
    }
    return "\n".join(_head(finding, case)) + "\n" + program("program.py.txt", "#=", "import ", 2, values)


def _head(finding: Finding, case: Case) -> Iterator[str]:
    model, command = model_file(case)
    yield f"# {json.dumps(str(finding.fault.signature))}"
    yield f"# {json.dumps(finding.fault.explanation)}"
    yield "#"
    if command:
        yield f"# model: {command}"
    yield f"# run:   python reproducer.py {model}"
    yield "# Ends with 0 where the fault is gone, with 1 or as the library dies where it is not, with 2 where it cannot be run."


def _call(call: Call) -> str:
    words = list(map(str, call.arguments))
    if call.settings is not None:
        words.append(_settings(call.settings))
    if call.name == "decode":
        words += [f"({run.slot}, {run.start}, {_tokens(run)}, {_outputs(run)})" for run in call.batch]
    elif call.name == "alone_decode":
        words.insert(1, _tokens(call.batch[0]))
    elif call.name == "close":
        return "llama_cpp.llama_free(context)\nllama_cpp.llama_model_free(model)"
    elif call.name.startswith("llama_memory_"):
        return f"llama_cpp.{call.name}({', '.join(['memory', *words])})"
    name = {"open": "open_context", "set": "set_state"}.get(call.name, call.name)
    return f"{name}({', '.join(words)})"


def _tokens(run: Tokens) -> str:
    if run.pattern is not None:
        return f"pattern({', '.join(map(str, run.pattern))}, {run.count})"
    return "None" if run.explicit is None else str(list(run.explicit))


def _outputs(run: Tokens) -> str:
    return f"range({run.count})" if run.outputs == tuple(range(run.count)) else str(list(run.outputs))


def _settings(settings: Settings) -> str:
    return f"dict({', '.join(f'{name}={_value(name, value)}' for name, value in settings.items())})"


def _value(name: str, value: int | float | bool | str) -> str:
    if name in ("type_k", "type_v"):
        return f'getattr(llama_cpp, "GGML_TYPE_" + {json.dumps(str(value).upper())})'
    if isinstance(value, str):
        return f"llama_cpp.LLAMA_{name.upper()}_{value.upper()}"
    return repr(value)
