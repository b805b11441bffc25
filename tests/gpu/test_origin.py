"""On a real GPU: the call that failed is named, by number, for every way a call can fail."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from isolate.trace.explain import explanation, why_refused
from isolate.trace.launch import kernel_name
from isolate.trace.origin import find_origin
from isolate.trace.record import Kind
from isolate.trace.ring import Ring
from tests.gpu.client import CAMPAIGN, Client, build_client, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

#: What a kernel does -> the errors that a device may answer with (illegal address; launch failure, illegal instruction)
BROKEN = {f"read:{1 << 40}": {700}, f"write:{1 << 40}": {700}, "fall": {715, 719}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return build_client(tmp_path_factory.mktemp("client"))


def test_a_refused_launch_is_explained(client: Client, tmp_path: Path) -> None:
    found = client.origin(tmp_path / "trace", "good", "bounded:192", "good", "last")
    assert found.origin is not None
    assert found.failure is not None
    assert (found.origin.launch, found.code, found.report.call) == (2, 1, "cudaGetLastError")
    assert found.failure.attributes["max_threads"] == 160
    assert why_refused(found.failure) == ["(192, 1, 1) = 192 threads a block, and this kernel allows at most 160"]
    assert "compiled for compute capability 7.0" in explanation(found)
    assert kernel_name(found.origin.name) == "bounded"


def test_two_thousand_failed_launches_are_named(client: Client, tmp_path: Path) -> None:
    """Injected, and really refused; read up to ten launches later."""
    turns, wrong = 2000, []
    with client.start(tmp_path / "trace", "malloc:4096", f"campaign:{turns}:1") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "malloc:4096 0\n"
        for _ in range(turns):
            _, number, code = process.stdout.readline().split()
            with Ring(tmp_path / "trace") as ring:
                found = find_origin(ring)
            if (
                found is None
                or found.origin is None
                or (found.origin.launch, found.code, found.exact) != (int(number), int(code), True)
                or found.report.call != "cudaGetLastError"
            ):
                wrong.append((number, code, found))
            process.stdin.write("\n")
            process.stdin.flush()
        process.communicate()
    assert wrong == []


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_device_is_laid_at_the_right_launch_in_sync_mode(client: Client, tmp_path: Path, broken: str) -> None:
    chance = random.Random(broken)
    for _ in range(CAMPAIGN):
        number, after = chance.randint(1, 40), chance.randint(0, 20)
        calls = ["malloc:4096", *["good"] * (number - 1), broken, *["good"] * after, "synchronize"]
        found = client.origin(tmp_path / "trace", *calls, mode="sync")
        assert found.origin is not None
        assert (found.origin.launch, found.exact) == (number, True)
        assert found.origin.code == 0
        assert found.code in BROKEN[broken]


@pytest.mark.parametrize("broken", BROKEN)
def test_without_sync_it_is_an_upper_bound(client: Client, tmp_path: Path, broken: str) -> None:
    chance = random.Random(broken)
    for _ in range(max(1, CAMPAIGN // 5)):
        number = chance.randint(1, 40)
        calls = ["malloc:4096", *["good"] * (number - 1), broken, *["good"] * 5, "synchronize"]
        found = client.origin(tmp_path / "trace", *calls)
        assert found.origin is not None
        assert found.origin.launch >= number
        assert not found.exact
        assert "upper bound" in explanation(found)


def test_a_window_finds_it_too_and_nothing_before_it(client: Client, tmp_path: Path) -> None:
    calls = ["malloc:4096", *["good"] * 20, f"read:{1 << 40}", *["good"] * 20, "synchronize"]
    found = client.origin(tmp_path / "trace", *calls, window="15-30")
    assert found.origin is not None
    assert (found.origin.launch, found.exact) == (21, True)
    assert not client.origin(tmp_path / "trace", *calls, window="25-30").exact


def test_a_stale_error_is_laid_at_the_call_that_made_it(client: Client, tmp_path: Path) -> None:
    found = client.origin(tmp_path / "trace", "malloc:4096", "good", "copy-past:64", *["good"] * 5, "last")
    assert found.origin is not None
    assert (found.origin.call, found.origin.code) == ("cudaMemcpyAsync", found.code)
    assert found.report.call == "cudaGetLastError"


def test_a_refused_launch_in_a_capture_spoils_it(client: Client, tmp_path: Path) -> None:
    calls = ["begin-capture:2", "good", "bounded:192", "good", "end-capture"]
    for mode in ("", "sync"):
        found = client.origin(tmp_path / "trace", *calls, mode=mode)
        assert found.origin is not None
        assert (found.origin.launch, found.origin.capturing) == (2, True)
        assert (found.report.call, found.code) == ("cudaStreamEndCapture", 901)


def test_nothing_is_synchronized_while_capturing(client: Client, tmp_path: Path) -> None:
    calls = ["malloc:4096", "begin-capture:2", "good", "set:64:1", "good", "end-capture", "instantiate", "graph"]
    printed = client.run(tmp_path / "trace", *calls, "synchronize", mode="sync,poison")
    assert set(printed.values()) == {0}
    with Ring(tmp_path / "trace") as ring:
        captured = [record for record in ring.records() if record.capturing]
        (graph,) = [record for record in ring.records() if record.call == "cudaGraphLaunch"]
    assert len(captured) == 3
    assert {record.sync for record in captured} == {None}
    assert graph.sync == 0


def test_a_fault_inside_a_graph_launch(client: Client, tmp_path: Path) -> None:
    calls = ["malloc:4096", "begin-capture:2", "good", f"write:{1 << 40}", "end-capture", "instantiate"]
    found = client.origin(tmp_path / "trace", *calls, "graph", "synchronize", mode="sync")
    assert found.origin is not None
    assert (found.origin.call, found.code, found.exact) == ("cudaGraphLaunch", 700, True)


def test_a_graph_that_cannot_be_updated(client: Client, tmp_path: Path) -> None:
    calls = ["malloc:4096", "begin-capture:2", "good", "end-capture", "instantiate"]
    calls += ["begin-capture:2", "good", "set:64:1", "end-capture", "update"]
    found = client.origin(tmp_path / "trace", *calls)
    assert found.origin is not None
    assert (found.origin.call, found.code) == ("cudaGraphExecUpdate", 910)


@pytest.mark.parametrize("mode", ["", "sync"])
def test_threads_and_devices_do_not_mix(client: Client, tmp_path: Path, mode: str) -> None:
    """Threads on all the devices that there are."""
    client.run(tmp_path / "trace", "turns:500", "threads:4", mode=mode)
    with Ring(tmp_path / "trace") as ring:
        launches = [record for record in ring.records() if record.kind == Kind.LAUNCH]
    seen = Counter((r.thread, r.stream, r.device, r.detail.block[0]) for r in launches)  # type: ignore[union-attr]
    assert list(seen.values()) == [500] * 4
    assert {block - 1 for *_, block in seen} == set(range(4))
    devices = len({device for _, _, device, _ in seen})
    assert all((block - 1) % devices == device for _, _, device, block in seen)
