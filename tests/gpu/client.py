"""The test program with the hooks before a real CUDA runtime. LD_LIBRARY_PATH must lead to a libcudart.so.13."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from isolate.trace.devices import gpus
from isolate.trace.origin import Origin, find_origin
from isolate.trace.ring import Ring
from tests.compile import ROOT, build

SOURCE = "tests/native/gpu_client.c"
HOOKS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "native").glob("*.c"))]
#: Library -> its calls in the program.
CALLS = {"libcudart.so.13": r"\w*cuda\w+", "libcuda.so.1": r"cu[A-Z]\w+"}
#: Faults of each kind in a campaign that starts a process for every one of them.
CAMPAIGN = int(os.environ.get("ISOLATE_CAMPAIGN", "10"))

needs_gpu = pytest.mark.skipif(not gpus()[0], reason=f"no GPU: {gpus()[1]}")


@dataclass
class Client:
    """The built program."""

    folder: Path

    def start(self, trace: Path, *calls: str, mode: str = "", window: str = "") -> subprocess.Popen[str]:
        """The program at work; it waits where it is told to."""
        environment = {**os.environ, "ISOLATE_TRACE": str(trace), "ISOLATE_TRACE_MODE": mode}
        if window:
            environment["ISOLATE_TRACE_WINDOW"] = window
        return subprocess.Popen(
            [self.folder / "client", *calls],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, trace: Path, *calls: str, mode: str = "", window: str = "", status: int = 0) -> dict[str, int]:
        """Call -> what it returned, the last one of each."""
        with self.start(trace, *calls, mode=mode, window=window) as process:
            printed, _ = process.communicate(timeout=120)
        assert process.returncode == status
        return {call: int(code) for call, code in (line.rsplit(" ", 1) for line in printed.splitlines())}

    def origin(self, trace: Path, *calls: str, mode: str = "", window: str = "") -> Origin:
        """Of a program that makes the calls and aborts."""
        self.run(trace, *calls, "abort", mode=mode, window=window, status=-6)
        with Ring(trace) as ring:
            found = find_origin(ring)
        assert found is not None
        return found


def build_client(folder: Path) -> Client:
    """The program, linked against libraries of CUDA's names that only have the names of its functions."""
    stub = folder / "stub"
    stub.mkdir()
    build(folder / "libisolate_trace.so", HOOKS, "-shared", "-fPIC", "-fvisibility=hidden")
    libraries = [str(folder / "libisolate_trace.so")]
    for library, functions in CALLS.items():
        names = re.findall(rf"^int ({functions})\(", (ROOT / SOURCE).read_text(), re.MULTILINE)
        source = stub / f"{library}.c"
        source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
        libraries.append(str(stub / library))
        build(stub / library, [str(source)], "-shared", "-fPIC", f"-Wl,-soname,{library}")
    build(folder / "client", [SOURCE], "-Wl,--no-as-needed", *libraries, f"-Wl,-rpath,{folder}", "-Wl,-z,now")
    return Client(folder)
