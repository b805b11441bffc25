"""Who runs the shares of a campaign: processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from isolate.errors import IsolateError
from isolate.replay.parent import end_with

#: Seconds in which a cluster's scheduler must answer.
PATIENCE = 5


class _Processes(ProcessPoolExecutor):
    """Ctrl-C at the terminal is for the parent, also while a process is still starting."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(function, *arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """So many processes of this machine; they are gone at the end, also when it comes early."""
    context = multiprocessing.get_context("spawn")
    executor = _Processes(jobs, context, end_with, (os.getpid(),))
    try:
        yield executor
    except BaseException as error:
        for process in list((executor._processes or {}).values()):
            process.kill()
        if sys.version_info < (3, 11, 5):
            # The thread that sends to them would wait for ever (gh-94777).
            executor._call_queue._reader.close()  # type: ignore[attr-defined]
        executor.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise IsolateError(
                "a process of the campaign was killed; the same command goes on from what is kept"
            ) from None
        raise
    executor.shutdown()


@contextmanager
def cluster(address: str) -> Iterator[tuple[Executor, int]]:
    """The workers of a Dask cluster that is running, and how many shares they can run at once. IsolateError without one."""
    try:
        from distributed import Client
    except ImportError:
        raise IsolateError("--cluster needs Dask: pip install 'isolate[cluster]'") from None
    # What it logs of connections that end says nothing that is not said here.
    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    connected: Any = Client
    try:
        client = connected(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise IsolateError(f"{address}: no Dask cluster answers there: {error}") from None
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise IsolateError(f"{address}: this Dask cluster has no workers")
        try:
            yield client.get_executor(pure=False), threads
        except IsolateError:
            raise
        except Exception as error:
            raise IsolateError(
                f"{address}: the Dask cluster did not run a share; is it still there? It says: {error!r}"
            ) from None
