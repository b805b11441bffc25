"""A campaign on the workers of a Dask cluster finds what it finds here."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from isolate.cli import main
from isolate.errors import IsolateError
from isolate.search.executors import cluster, processes
from tests.campaigns import PLAN, PLANTED, campaign, files, kept

distributed: Any = pytest.importorskip("distributed")

#: Shares that are compared.
CASES = 4 * PLAN.size


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster of two processes on this machine, on a library with a planted fault."""
    monkeypatch.setenv("MUTANT", PLANTED)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=logging.CRITICAL
    ) as running:
        yield running.scheduler_address


def test_a_cluster_finds_what_one_machine_finds(address: str, tmp_path: Path) -> None:
    with campaign(tmp_path / "there") as there, cluster(address) as (executor, at_once):
        assert at_once == 2
        there.run(executor, at_once, CASES, None)
    with campaign(tmp_path / "here") as here, processes(2) as executor:
        here.run(executor, 2, CASES, None)
    assert kept(tmp_path / "there") == kept(tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert there.totals.cases == CASES
    with pytest.raises(IsolateError, match=r"the Dask cluster did not run a share.*planted"), cluster(address) as _:
        raise RuntimeError("planted")


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:1", "nowhere://x:1"])
def test_a_wrong_address_is_one_sentence(wrong: str, tmp_path: Path) -> None:
    started = time.monotonic()
    result = CliRunner().invoke(main, ["fuzz", "--cluster", wrong, "--out", str(tmp_path / "c")])
    assert time.monotonic() - started < 15
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"Error: {wrong}: no Dask cluster answers there: ")
