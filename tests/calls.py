"""CUDA calls and what an H200 answered to each (data/h200_calls.txt), with the kernels they launch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isolate.trace import dry, gpus
from tests.compile import ROOT
from tests.fatbinary import Entry, build, container, cubin, ptx, shared

RECORDED = Path(__file__).parent / "data" / "h200_calls.txt"
#: cases whose launches were recorded on the H200, beside them
LAUNCHES = sorted((Path(__file__).parent / "data" / "launches").glob("*.json"))
REGISTERS = {20: 32, 50: 56, 70: 80, 100: 128, 130: 168, 200: 254}


def _heavy(name: str, values: int) -> str:
    """Statements that keep so many values alive at once, which the compiler may not reorder."""
    lines = [f".reg .b32 %r<{values + 2}>;", ".reg .b64 %rd<3>;", f"ld.param.u64 %rd1, [{name}_param_0];"]
    lines.append("cvta.to.global.u64 %rd2, %rd1;")
    lines += [f"ld.volatile.global.u32 %r{n + 1}, [%rd2+{4 * n}];" for n in range(values)]
    lines += [f"st.volatile.global.u32 [%rd2+{4 * n}], %r{n + 1};" for n in range(values)]
    return "|" + "\n".join(f"\t{line}" for line in lines)


_WRITES = """|\t.reg .b64 %rd<3>;
\tld.param.u64 %rd1, [writes_param_0];
\tcvta.to.global.u64 %rd2, %rd1;
\tst.global.u64 [%rd2], %rd1;
"""
_PLAIN = {
    "bound160": ".maxntid 160, 1, 1\n.minnctapersm 1",
    "plain": "",
    "big_static": "|" + shared(16384, "v16k"),
    "static48": "|" + shared(49152, "v48k"),
    "required128": ".reqntid 128, 1, 1",
    "bounds3d": ".maxntid 8, 8, 4",
    "occ4": ".maxntid 256, 1, 1\n.minnctapersm 4",
    "static1k": ".maxntid 128, 1, 1|" + shared(1000, "v1000"),
    "writes": _WRITES,
    **{f"heavy{values}": _heavy(f"heavy{values}", values) for values in REGISTERS},
}
_TABLE = ".visible .global .align 4 .b8 table[64];"
_CLUSTERS = {
    "cluster2": ".explicitcluster\n.reqnctapercluster 2, 1, 1",
    "maxcluster4": ".maxntid 128, 1, 1\n.maxclusterrank 4",
}
#: kernel -> its versions: kind, architecture, variant and, to tell them apart, threads of the launch bound
_PICKS = {
    "pick1": "ptx80:96 ptx90:128 ptx90a:160",
    "pick2": "ptx90a:160 ptx90:128 ptx80:96",
    "pick3": "cubin90:192 ptx90a:160",
    "pick4": "cubin90:192 cubin90a:224",
    "pick5": "cubin90a:224 cubin90:192",
    "pick6": "cubin90a:224 ptx90:128",
    "pick7": "cubin89:64 cubin80:32 ptx80:96",
    "pick8": "cubin89:64 cubin80:32",
}
#: what cubins say of the kernels above, for a device that has to be told how many registers they need
_KNOWN: dict[str, dict[str, object]] = {
    "bound160": {"threads": (160, 1, 1), "registers": 8},
    "plain": {"registers": 8},
    "big_static": {"registers": 8, "shared": 16384},
    "required128": {"required": (128, 1, 1), "registers": 8},
    "static1k": {"threads": (128, 1, 1), "registers": 8, "shared": 1000},
    **{f"heavy{values}": {"registers": registers} for values, registers in REGISTERS.items()},
}


def _pick(name: str, versions: str) -> bytes:
    entries = []
    for version in versions.split():
        kind, number, variant, threads = re.fullmatch(r"(ptx|cubin)(\d+)(a?):(\d+)", version).groups()  # type: ignore[union-attr]
        if kind == "ptx":
            content = ptx({name: f".maxntid {threads}, 1, 1"}, f"sm_{number}{variant}")
        else:
            content = cubin(int(number), {name: {"threads": (int(threads), 1, 1), "registers": 8}})
        entries.append(Entry(kind, int(number), content, variant))
    return container(entries)


@dataclass(frozen=True)
class Client:
    """The program that makes the calls of a script."""

    program: Path
    kernels: str

    def run(self, script: Sequence[str], environment: Mapping[str, str], major: int = 13) -> list[str]:
        """Each call of a script with what it returned."""
        done = subprocess.run(
            [self.program, self.kernels, str(major)],
            input="\n".join(script) + "\n",
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # cuBLAS prints to standard output, too
        return [line for line in done.stdout.splitlines() if " -> " in line]


def client(folder: Path, *flags: str) -> Client:
    """The program with its kernels as PTX, which a real driver compiles."""
    future = ptx({"future": ""}, "sm_120").replace(b".version 8.0", b".version 8.7")
    units = {
        ",".join(_PLAIN) + ",@table": container([Entry("ptx", 80, ptx(_PLAIN, before=_TABLE))]),
        ",".join(_CLUSTERS): container([Entry("ptx", 90, ptx(_CLUSTERS, "sm_90"))]),
        "future": container([Entry("ptx", 120, future)]),
        **{name: _pick(name, versions) for name, versions in _PICKS.items()},
    }
    return _client(folder / "client", units, *flags)


def known_client(folder: Path, *flags: str) -> Client:
    """The program with kernels whose registers are known: as machine code, which only the dry device takes for it."""
    future = {"future": container([Entry("cubin", 120, cubin(120, {"future": {"registers": 8}}))])}
    return _client(
        folder / "known_client",
        {",".join(_KNOWN): container([Entry("cubin", 90, cubin(90, _KNOWN, compiled_for=80))]), **future},
        *flags,
    )


def _client(program: Path, units: dict[str, bytes], *flags: str) -> Client:
    return Client(
        build(program, list(units.values()), str(ROOT / "tests" / "native" / "dry_client.c"), *flags), ";".join(units)
    )


def environment(program: Path, gpu: str = "h200", libraries: Path | None = None) -> dict[str, str]:
    """What a program needs to find the stand-ins, and its kernels in the table."""
    configuration = dry.configuration(gpus.find_all(gpu), [program])
    return {"ISOLATE_DRY": str(configuration), "LD_LIBRARY_PATH": str(libraries or dry.native_folder())}


def recorded() -> dict[str, list[str]]:
    """Title -> calls with their answers."""
    parts = RECORDED.read_text().split("---\n")
    return {lines[0].removeprefix("# "): lines[1:] for lines in (part.splitlines() for part in parts) if lines}


def script(answers: Sequence[str]) -> list[str]:
    """The calls alone."""
    return [answer.partition(" -> ")[0] for answer in answers]
