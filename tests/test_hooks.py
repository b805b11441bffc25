"""The hooks, in front of a stand-in CUDA that fails on demand: what failed is named, and nothing else is changed."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from isolate.trace.origin import Origin, find_origin
from isolate.trace.record import CopyDetail, Kind, LaunchDetail
from isolate.trace.ring import Ring
from tests.compile import ROOT, build

HOOKS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "native").glob("*.c"))]
STANDINS = {"libcudart.so.13": "standin.c", "libcublas.so.13": "standin_blas.c", "libcuda.so.1": "standin_driver.c"}


@dataclass
class Client:
    """The test program with the hooks before the stand-ins, as a build is bound."""

    folder: Path

    def run(
        self, trace: Path, *calls: str, fail: str = "", mode: str = "", window: str = "", status: int = 0
    ) -> list[str]:
        """What each call printed."""
        environment = {**os.environ, "ISOLATE_TRACE": str(trace), "STANDIN_FAIL": fail, "ISOLATE_TRACE_MODE": mode}
        environment |= {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "handle_segv=0:handle_abort=0"}
        if window:
            environment["ISOLATE_TRACE_WINDOW"] = window
        done = subprocess.run(
            ["setarch", "-R", self.folder / "client", *calls],
            env=environment,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
        )
        assert done.returncode == status
        return done.stdout.splitlines()


def build_client(folder: Path, *flags: str) -> Client:
    shared = ("-shared", "-fPIC", *flags)
    for name, source in STANDINS.items():
        build(folder / name, [f"tests/native/{source}"], *shared, f"-Wl,-soname,{name}")
    build(folder / "libisolate_trace.so", HOOKS, *shared, "-fvisibility=hidden")
    build(folder / "client", ["tests/native/client.c"], *linking(folder), *flags)
    return Client(folder)


def linking(folder: Path) -> list[str]:
    """With the hooks of that folder before its stand-ins."""
    libraries = [str(folder / name) for name in ("libisolate_trace.so", *STANDINS)]
    return ["-Wl,--no-as-needed", *libraries, f"-Wl,-rpath,{folder}", "-Wl,-z,now"]


@pytest.fixture(scope="module", params=["plain", "thread", "address,undefined"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Client:
    flags = [] if request.param == "plain" else [f"-fsanitize={request.param}", "-fno-sanitize-recover=all"]
    return build_client(tmp_path_factory.mktemp("client"), *flags)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Without a sanitizer, for what ends in a signal on purpose."""
    return build_client(tmp_path_factory.mktemp("plain"))


def origin_of(trace: Path) -> Origin:
    with Ring(trace) as ring:
        found = find_origin(ring)
    assert found is not None
    return found


def test_every_launch_is_recorded_with_its_geometry(client: Client, tmp_path: Path) -> None:
    calls = ["stream", "device:1", "launch:3", "handle:4", "cluster:5", "unnamed", "last"]
    assert client.run(tmp_path / "trace", *calls) == [f"{call} 0" for call in calls]
    with Ring(tmp_path / "trace") as ring:
        launches = [record for record in ring.records() if record.kind == Kind.LAUNCH]
        stream = next(record.detail for record in ring.records() if record.call == "cudaStreamCreateWithFlags")
    assert [(launch.launch, launch.call, launch.name) for launch in launches] == [
        (1, "cudaLaunchKernel", "_Z7kernel3IfEvPfi"),
        (2, "__cudaLaunchKernel", "_Z7kernel4IfEvPfi"),
        (3, "cudaLaunchKernelExC", "_Z7kernel5IfEvPfi"),
        (4, "cudaLaunchKernel", "_Z7unnamedv"),
    ]
    details = [launch.detail for launch in launches if isinstance(launch.detail, LaunchDetail)]
    assert [(detail.grid, detail.block, detail.cluster, detail.shared) for detail in details] == [
        ((4, 2, 3), (32, 4, 1), (0, 0, 0), 300),
        ((5, 2, 3), (32, 5, 1), (0, 0, 0), 0),
        ((8, 8, 1), (64, 1, 1), (4, 2, 1), 512),
        ((1, 1, 1), (1, 1, 1), (0, 0, 0), 0),
    ]
    assert isinstance(stream, tuple)
    assert {(launch.device, launch.stream, launch.code, launch.done) for launch in launches} == {
        (1, stream[0], 0, True)
    }


def test_other_calls_are_recorded_with_what_they_were_given(client: Client, tmp_path: Path) -> None:
    client.run(tmp_path / "trace", "malloc:1000", "set:1000:7", "copy:24", "free", "blas", "gemm", "synchronize")
    with Ring(tmp_path / "trace") as ring:
        records = {record.call: record for record in ring.records()}
    memory, filled, copied = (records[call].detail for call in ("cudaMalloc", "cudaMemset", "cudaMemcpyAsync"))
    assert isinstance(memory, CopyDetail)
    assert memory.bytes == 1000
    address = memory.destination
    assert address
    assert filled == CopyDetail(1000, address, 0, -1, 7)
    assert copied == CopyDetail(24, address, address, 3, 0)
    assert isinstance(records["cudaFree"].detail, CopyDetail)
    assert records["cudaFree"].detail.destination == address
    assert records["cublasSgemm_v2"].detail[:4] == (2, 3, 4, 1)  # type: ignore[index]
    assert records["cudaStreamSynchronize"].kind == Kind.SYNC


def test_a_refused_launch_is_the_origin_and_the_last_error_only_the_report(client: Client, tmp_path: Path) -> None:
    calls = ["stream", "launch:1", "last", "launch:2", "last", "launch:3"]
    printed = client.run(tmp_path / "trace", *calls, fail="cudaLaunchKernel:2:1")
    assert printed == ["stream 0", "launch:1 0", "last 0", "launch:2 1", "last 1", "launch:3 0"]
    with Ring(tmp_path / "trace") as ring:
        (failure,) = ring.failures()
        assert failure.record.launch == 2
        assert (failure.record.before, failure.record.after) == (0, 1)
        assert failure.attributes == {
            **{"shared_static": 4096, "constant": 0, "local": 0, "max_threads": 160, "registers": 42},
            **{"ptx": 80, "binary": 90, "shared_dynamic_max": 49152},
        }
        assert failure.limits["major"] == 9
        assert failure.limits["max_threads"] == 1001
        assert any(f"{client.folder.name}/client+0x" in frame for frame in failure.frames)
        assert not any("libisolate_trace" in frame for frame in failure.frames)
        assert failure.driver_log == "[12:00][Error] the driver's own words"


def test_a_stale_error_is_laid_at_the_call_that_made_it(client: Client, tmp_path: Path) -> None:
    """A copy fails, nobody looks, five launches later the last error is asked for."""
    launches = [f"launch:{number}" for number in range(5)]
    calls = ["stream", "malloc:8", "launch:9", "copy:8", *launches, "last", "abort"]
    client.run(tmp_path / "trace", *calls, fail="cudaMemcpyAsync:1:17", status=-6)
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.call, found.origin.code, found.code) == ("cudaMemcpyAsync", 17, 17)
    assert found.report.call == "cudaGetLastError"
    assert found.exact
    with Ring(tmp_path / "trace") as ring:
        assert [failure.record.call for failure in ring.failures()] == ["cudaMemcpyAsync"]
        assert [record.before for record in ring.records() if record.kind == Kind.LAUNCH] == [0, 17, 17, 17, 17, 17]
        assert ring.abort_text == "file.cu:12: CUDA error"


def test_an_error_that_was_read_is_not_blamed_later(client: Client, tmp_path: Path) -> None:
    calls = ["stream", "malloc:8", "copy:8", "last", "launch:1", "last", "abort"]
    client.run(tmp_path / "trace", *calls, fail="cudaMemcpyAsync:1:1,cudaLaunchKernel:1:1", status=-6)
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert found.origin.kind == Kind.LAUNCH


@pytest.mark.parametrize("number", range(1, 9))
def test_a_broken_device_is_laid_at_the_right_launch_in_sync_mode(client: Client, tmp_path: Path, number: int) -> None:
    launches = [call for turn in range(8) for call in (f"launch:{turn}", "last")]
    fail = f"cudaLaunchKernel:{number}:700!"
    calls = ["stream", *launches, "synchronize", "abort"]
    printed = client.run(tmp_path / "trace", *calls, fail=fail, mode="sync", status=-6)
    # That the stream was not ready when it was asked is not seen by the build.
    assert [line for line in printed if line.startswith("last")][: number - 1] == ["last 0"] * (number - 1)
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.launch, found.origin.code, found.origin.sync) == (number, 0, 700)
    assert found.exact
    assert found.failure is not None


def test_calls_that_are_handed_on_are_not_recorded(client: Client, tmp_path: Path) -> None:
    client.run(tmp_path / "trace", "launch:1", "pass:1", "launch:2", "pass:0", "launch:3")
    with Ring(tmp_path / "trace") as ring:
        assert [record.launch for record in ring.records() if record.kind == Kind.LAUNCH] == [1, 2]


def test_without_sync_a_broken_device_gives_an_upper_bound(client: Client, tmp_path: Path) -> None:
    calls = ["stream", *(f"launch:{turn}" for turn in range(8)), "synchronize", "abort"]
    printed = client.run(tmp_path / "trace", *calls, fail="cudaLaunchKernel:3:700!", status=-6)
    assert printed[-1] == "synchronize 700"
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert found.origin.call == "cudaStreamSynchronize"
    assert not found.exact
    with Ring(tmp_path / "trace") as ring:
        assert {record.sync for record in ring.records()} == {None}


def test_a_window_synchronizes_nothing_else(client: Client, tmp_path: Path) -> None:
    calls = ["stream", *(f"launch:{turn}" for turn in range(8)), "abort"]
    client.run(tmp_path / "inside", *calls, fail="cudaLaunchKernel:5:700!", window="4-6", status=-6)
    found = origin_of(tmp_path / "inside")
    assert found.origin is not None
    assert (found.origin.launch, found.exact) == (5, True)
    with Ring(tmp_path / "inside") as ring:
        assert [record.launch for record in ring.records() if record.sync is not None] == [4, 5]
    client.run(tmp_path / "before", *calls, fail="cudaLaunchKernel:2:700!", window="4-6", status=-6)
    found = origin_of(tmp_path / "before")
    assert not found.exact  # it broke before the window: not laid at the first launch in it


def test_nothing_is_synchronized_while_capturing(client: Client, tmp_path: Path) -> None:
    calls = ["stream", "launch:1", "begin-capture:2", "launch:2", "launch:3", "end-capture", "instantiate", "graph"]
    printed = client.run(tmp_path / "trace", *calls, "launch:4", mode="sync")
    assert printed[2:] == ["begin-capture:2 0", *(f"{call} 0" for call in calls[3:]), "launch:4 0"]
    with Ring(tmp_path / "trace") as ring:
        queued = [r for r in ring.records() if r.kind == Kind.LAUNCH or r.call == "cudaGraphLaunch"]
    assert [(r.capturing, r.sync) for r in queued] == [(False, 0), (True, None), (True, None), (False, 0), (False, 0)]


def test_a_global_capture_forbids_to_synchronize_any_stream(client: Client, tmp_path: Path) -> None:
    client.run(tmp_path / "trace", "stream", "begin-capture:0", "launch:2", "malloc:8", "set:8:0", mode="sync")
    with Ring(tmp_path / "trace") as ring:
        assert {record.sync for record in ring.records()} == {None}


@pytest.mark.parametrize(
    ("fail", "name"),
    [
        ("cudaLaunchKernel:1:1,cudaStreamEndCapture:1:901", "cudaLaunchKernel"),
        ("cudaStreamEndCapture:1:901", "cudaStreamEndCapture"),
        ("cudaGraphInstantiate:1:2", "cudaGraphInstantiate"),
        ("cudaGraphExecUpdate:1:910", "cudaGraphExecUpdate"),
        ("cudaGraphLaunch:1:1", "cudaGraphLaunch"),
    ],
)
def test_faults_of_cuda_graphs_are_named(client: Client, tmp_path: Path, fail: str, name: str) -> None:
    calls = ["stream", "begin-capture:2", "launch:1", "end-capture", "instantiate", "update", "graph"]
    code = fail.rsplit(":", 1)[1]
    for end in range(len(calls), 0, -1):  # the program stops at the call that says it
        if fail.rsplit(",", 1)[-1].split(":")[0].lower().endswith(calls[end - 1].replace("-", "")):
            calls = calls[:end]
            break
    client.run(tmp_path / "trace", *calls, "abort", fail=fail, status=-6)
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert found.origin.call == name
    assert found.code == int(code)


def test_a_fault_inside_a_graph_launch_is_laid_at_it_in_sync_mode(client: Client, tmp_path: Path) -> None:
    calls = ["stream", "begin-capture:2", "launch:1", "end-capture", "instantiate", "graph", "synchronize", "abort"]
    client.run(tmp_path / "trace", *calls, fail="cudaGraphLaunch:1:700!", mode="sync", status=-6)
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.call, found.exact) == ("cudaGraphLaunch", True)


def test_a_cublas_status_is_seen(client: Client, tmp_path: Path) -> None:
    client.run(tmp_path / "trace", "stream", "blas", "gemm", "gemm", "abort", fail="cublasSgemm_v2:2:13", status=-6)
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.call, found.code, found.origin is found.report) == ("cublasSgemm_v2", 13, True)


@pytest.mark.parametrize(
    ("inject", "calls", "origin"),
    [
        ("inject-launch:3:1", ["launch:1", "last", "launch:2", "last", "handle:3", "last"], ("__cudaLaunchKernel", 1)),
        ("inject-launch:1:701", ["cluster:1", "launch:2", "launch:3", "last"], ("cudaLaunchKernelExC", 701)),
        ("inject-copy:2:1", ["malloc:8", "copy:8", "copy:4", "launch:1", "last"], ("cudaMemcpyAsync", 1)),
        (
            "inject-graph:4:910",
            ["begin-capture:2", "end-capture", "instantiate", "update"],
            ("cudaGraphExecUpdate", 910),
        ),
        ("inject-blas:3:14", ["blas", "gemm"], ("cublasSgemm_v2", 14)),
    ],
)
def test_injected_faults_look_like_real_ones(
    client: Client, tmp_path: Path, inject: str, calls: list[str], origin: tuple[str, int]
) -> None:
    printed = client.run(tmp_path / "trace", "stream", inject, *calls, "abort", status=-6)
    assert printed[-1].endswith(f" {origin[1]}")
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.call, found.code, found.origin.injected) == (*origin, True)


def test_an_injected_error_is_read_once(client: Client, tmp_path: Path) -> None:
    printed = client.run(
        tmp_path / "trace", "inject-launch:1:1", "launch:1", "peek", "last", "peek", "launch:1", "last"
    )
    assert printed == ["inject-launch:1:1 0", "launch:1 1", "peek 1", "last 1", "peek 0", "launch:1 0", "last 0"]


def test_reading_the_evidence_does_not_change_the_last_error(client: Client, tmp_path: Path) -> None:
    fail = "cudaLaunchKernel:1:1,cudaFuncGetAttributes:1:98,cudaDeviceGetAttribute:14:101"
    printed = client.run(tmp_path / "trace", "launch:1", "peek", "last", "peek", fail=fail)
    assert printed == ["launch:1 1", "peek 1", "last 1", "peek 0"]
    with Ring(tmp_path / "trace") as ring:
        (failure,) = ring.failures()
    assert failure.attributes == {}  # could not be read, so nothing is said
    assert "processors" not in failure.limits


@pytest.mark.parametrize("mode", ["", "sync"])
def test_threads_do_not_mix(client: Client, tmp_path: Path, mode: str) -> None:
    client.run(tmp_path / "trace", "turns:500", "threads:4", mode=mode)
    with Ring(tmp_path / "trace") as ring:
        launches = [record for record in ring.records() if record.kind == Kind.LAUNCH]
        assert sorted(launch.launch for launch in launches) == list(range(1, 2001))
    assert Counter(launch.device for launch in launches) == dict.fromkeys(range(4), 500)
    seen = {(launch.device, launch.name, launch.stream, launch.thread) for launch in launches}
    assert len(seen) == 4
    assert {(device, name) for device, name, *_ in seen} == {(n, f"_Z7kernel{n}IfEvPfi") for n in range(4)}


def test_one_thread_is_not_blamed_for_another_in_sync_mode(client: Client, tmp_path: Path) -> None:
    fail = "cudaLaunchKernel:777:700!"
    client.run(tmp_path / "trace", "turns:500", "threads:4", fail=fail, mode="sync")
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.launch, found.origin.code, found.origin.sync, found.exact) == (777, 0, 700, True)


def test_a_call_that_waited_while_another_thread_broke_the_device_is_not_blamed(client: Client, tmp_path: Path) -> None:
    calls = ["stream", "launch-while-waiting:1", "last"]
    client.run(tmp_path / "trace", *calls, fail="cudaLaunchKernel:1:700!", mode="sync")
    with Ring(tmp_path / "trace") as ring:
        assert [failure.record.call for failure in ring.failures()][:2] == ["cudaEventSynchronize", "cudaLaunchKernel"]
    found = origin_of(tmp_path / "trace")
    assert found.origin is not None
    assert (found.origin.launch, found.origin.sync, found.exact) == (1, 700, True)


def test_what_a_build_imports_is_held_against_the_hooks(client: Client, tmp_path: Path) -> None:
    printed = client.run(tmp_path / "trace", "device:0", "live")
    counts = dict(part.split("=") for part in printed[1].split())
    assert counts["libraries"] == "1"
    assert int(counts["hooked"]) > 20
    assert (counts["elsewhere"], counts["unresolved"]) == ("0", "0")
    assert counts["uncovered"] == "1"
    assert counts["unrecorded"] == "2"
    with Ring(tmp_path / "trace") as ring:
        (note,) = [record for record in ring.records() if record.kind == Kind.NOTE]
    assert (note.call, note.name) == ("no hook for an import", "cudaInventedCall")


def test_an_error_of_a_call_without_hook_is_laid_at_no_launch(client: Client, tmp_path: Path) -> None:
    calls = ["live", "launch:1", "invented", "launch:2", "last"]
    client.run(tmp_path / "trace", *calls, fail="cudaInventedCall:1:17")
    found = origin_of(tmp_path / "trace")
    assert (found.origin, found.code, found.report.call) == (None, 17, "cudaGetLastError")


@pytest.mark.parametrize(
    ("calls", "fail", "before"),
    [
        (["launch:1", "copy:4", "launch:2"], "cudaMemcpyAsync:1:17", [0, 17]),
        (["launch:1", "copy:4", "last", "launch:2"], "cudaMemcpyAsync:1:17", [0, 0]),
        (["launch:1", "query", "launch:2", "last", "launch:3"], "", [0, 600, 0]),
        (["launch:1", "launch:2", "launch:3"], "cudaLaunchKernel:2:1", [0, 0, 1]),
    ],
)
def test_where_all_calls_are_hooked_the_last_error_is_known_without_asking(
    plain: Client, tmp_path: Path, calls: list[str], fail: str, before: list[int]
) -> None:
    build(tmp_path / "client", ["tests/native/client.c"], "-DALL_HOOKED", *linking(plain.folder))
    printed = Client(tmp_path).run(tmp_path / "trace", "stream", "malloc:8", "live", *calls, fail=fail)
    assert "uncovered=0" in printed[2]
    with Ring(tmp_path / "trace") as ring:
        assert [record.before for record in ring.records() if record.kind == Kind.LAUNCH] == before


def test_hooks_that_came_too_late_are_found_out(plain: Client, tmp_path: Path) -> None:
    """The runtime stands before the hooks in the order of search: every import is bound past them."""
    libraries = [str(plain.folder / name) for name in (*STANDINS, "libisolate_trace.so")]
    late = ("-Wl,--no-as-needed", *libraries, f"-Wl,-rpath,{plain.folder}", "-Wl,-z,now")
    build(tmp_path / "client", ["tests/native/client.c"], *late)
    printed = Client(tmp_path).run(tmp_path / "trace", "live")
    counts = dict(part.split("=") for part in printed[0].split())
    assert counts["hooked"] == "0"
    assert int(counts["elsewhere"]) > 20


def test_no_vmm_hides_virtual_memory(plain: Client, tmp_path: Path) -> None:
    assert plain.run(tmp_path / "trace", "vmm") == ["vmm 1"]
    for mode in ("no-vmm", "fence", "fence-before"):
        assert plain.run(tmp_path / "trace", "vmm", mode=mode) == ["vmm 0"]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 4096, 65535, 65536, 65537])
def test_a_fence_stands_right_behind_an_allocation(plain: Client, tmp_path: Path, size: int) -> None:
    guarded = -(-size // 16) * 16
    calls = [f"malloc:{size}", "read:0", f"read:{size - 1}", f"read:{guarded - 1}"]
    assert plain.run(tmp_path / "trace", *calls, "free", mode="fence")[-1] == "free 0"
    for past in (guarded, guarded + 18432):
        plain.run(tmp_path / "trace", *calls, f"read:{past}", mode="fence", status=-11)
    assert plain.run(tmp_path / "trace", f"malloc:{size}", "read:0", "free", mode="fence-before")[-1] == "free 0"
    plain.run(tmp_path / "trace", f"malloc:{size}", "read:-1", mode="fence-before", status=-11)


def test_poison_fills_fresh_memory(client: Client, tmp_path: Path) -> None:
    for mode in ("poison", "poison,fence"):
        assert client.run(tmp_path / "trace", "malloc:100", "poisoned:0", "poisoned:99", "free", mode=mode)[1:3] == [
            "poisoned:0 1",
            "poisoned:99 1",
        ]
    assert client.run(tmp_path / "trace", "malloc:100", "poisoned:0", "free")[1] == "poisoned:0 0"


def test_a_process_without_a_trace_is_left_alone(client: Client, tmp_path: Path) -> None:
    assert client.run(tmp_path, "launch:1", "last") == ["launch:1 0", "last 0"]  # a folder: nothing can be written
