"""A build's kernels for a person at a terminal: what each allows, and the code that a GPU would run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from isolate.trace.bounds import Bounds
from isolate.trace.gpus import Gpu
from isolate.trace.kernels import Code, Kernel, Table, select
from isolate.trace.launch import kernel_name


def chosen(tables: Iterable[Table], name: str | None) -> Iterator[Kernel]:
    """The kernels with `name` in their readable or mangled name; all of them when it is None."""
    for table in tables:
        for kernel in table.kernels:
            if name is None or name in kernel.name or name in kernel_name(kernel.name):
                yield kernel


def text(kernels: Iterable[Kernel], gpu: Gpu | None) -> Iterator[str]:
    """A line a kernel; with a GPU the code it would run, and at the end how many kernels have none for it."""
    total = without = 0
    for kernel in kernels:
        total += 1
        if gpu is None:
            codes = "; ".join(f"{code} {_limits(code.bounds)}" for code in kernel.codes)
            yield f"{kernel_name(kernel.name)}  {codes}"
            continue
        code = select(kernel, gpu.capability)
        without += code is None
        yield f"{kernel_name(kernel.name)}  {f'{code} {_limits(code.bounds)}' if code else 'NO CODE for this GPU'}"
    yield f"{total} kernels" + (f"; {without} of them have no code that {gpu.name} can run" if gpu and without else "")


def data(kernels: Iterable[Kernel], gpu: Gpu | None) -> dict[str, Any]:
    """The same as plain data; `runs` is the code that the GPU would run, or null."""
    return {
        "schema": "isolate.kernels/1",
        "gpu": gpu.name if gpu else None,
        "kernels": [_kernel(kernel, gpu) for kernel in kernels],
    }


def _kernel(kernel: Kernel, gpu: Gpu | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": kernel_name(kernel.name),
        "mangled": kernel.name,
        "codes": [_code(code) for code in kernel.codes],
    }
    if gpu is not None:
        code = select(kernel, gpu.capability)
        found["runs"] = None if code is None else str(code)
    return found


def _code(code: Code) -> dict[str, Any]:
    bounds = code.bounds
    return {
        "code": str(code),
        "max_threads": bounds.most_threads,
        "registers": bounds.registers,
        "static_shared": bounds.static_shared,
        "parameters": bounds.parameters,
    }


def _limits(bounds: Bounds) -> str:
    said = [f"{bounds.most_threads} threads"] if bounds.most_threads else ["any block"]
    said += [f"{bounds.registers} registers"] if bounds.registers is not None else []
    said += [f"{bounds.static_shared} bytes shared"] if bounds.static_shared else []
    return f"({', '.join(said)})"
