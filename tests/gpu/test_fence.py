"""On a real GPU: a read past a buffer that passes silently is named under `fence`."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isolate.trace.ring import Ring
from tests.gpu.client import CAMPAIGN, Client, build_client, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return build_client(tmp_path_factory.mktemp("client"))


def overruns(count: int) -> list[tuple[int, int]]:
    """Sizes of buffers of every alignment, and how far past their guarded end a read goes: 1 to 18,432 bytes."""
    chance = random.Random(3)
    found = []
    for turn in range(count):
        size = chance.choice([chance.randint(1, 4096), chance.randint(1, 1 << 18), 16 * chance.randint(1, 4096)])
        found.append((size, (1, 18432)[turn] if turn < 2 else chance.randint(1, 18432)))
    return found


def guarded(size: int) -> int:
    """Where the fence stands: addresses are aligned to 16 bytes, so up to 15 bytes behind a buffer are not guarded."""
    return -(-size // 16) * 16


def test_an_overrun_inside_a_pool_is_silent(client: Client, tmp_path: Path) -> None:
    calls = []
    for size, past in overruns(20 * CAMPAIGN):
        calls += [f"pool:{size}", f"read:{guarded(size) + past - 1}", "synchronize"]
    assert set(client.run(tmp_path / "trace", *calls).values()) == {0}


@pytest.mark.slow
def test_the_same_overrun_is_named_under_fence(client: Client, tmp_path: Path) -> None:
    def named(overrun: tuple[int, int]) -> tuple[int, int, bool] | None:
        size, past = overrun
        calls = [f"pool:{size}", "good", "read:0", f"read:{size - 1}", f"read:{guarded(size) + past - 1}", "good"]
        found = client.origin(tmp_path / f"{size}-{past}", *calls, "synchronize", mode="fence,sync")
        return (found.origin.launch, found.code, found.exact) if found.origin else None

    wanted = overruns(20 * CAMPAIGN)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seen = dict(zip(wanted, pool.map(named, wanted), strict=True))
    assert {overrun: what for overrun, what in seen.items() if what != (4, 700, True)} == {}


def test_an_underrun_is_named_under_fence_before(client: Client, tmp_path: Path) -> None:
    calls = ["malloc:100", "good", "read:0", "read:-1", "synchronize"]
    found = client.origin(tmp_path / "trace", *calls, mode="fence-before,sync")
    assert found.origin is not None
    assert (found.origin.launch, found.code, found.exact) == (3, 700, True)


def test_what_stays_inside_passes_under_every_mode(client: Client, tmp_path: Path) -> None:
    calls = []
    for size, _ in overruns(20):
        calls += [f"malloc:{size}", "read:0", f"write:{size - 1}", f"set:{size}:7", "synchronize", "free"]
    for mode in ("fence", "fence-before", "fence,poison", "fence,sync", "no-vmm,poison"):
        assert set(client.run(tmp_path / "trace", *calls, mode=mode).values()) == {0}
        with Ring(tmp_path / "trace") as ring:
            assert ring.failed == 0
