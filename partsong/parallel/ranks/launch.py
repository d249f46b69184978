"""Starts local ranks, and ends all of them when one fails."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from partsong.errors import ArgumentError
from partsong.foreign_messages import hide_if_parent_does
from partsong.fork_server import changed_environment, context_with, threads_per_rank
from partsong.knobs import Count, check_value
from partsong.parallel.ranks.blame import BLAMED_GRACE, GRACE, RankReport, first_cause, is_blamed
from partsong.parent import end_with_parent

__all__ = ["launch", "portable"]


def launch(fn: Callable[..., Any], nproc: int, *args: Any) -> Any:
    """Runs ``fn(*args)`` on `nproc` local ranks and returns what rank 0 returned.

    Each rank is a fresh process with ``RANK``, ``WORLD_SIZE`` and the rendezvous set as under ``torchrun``, so ``fn``
    begins with a `Mesh`. The rendezvous store lives in the calling process and outlives any rank. A single rank also
    runs in a process of its own. On Linux without CUDA, ranks are forked from a server process that has imported torch
    once. Elsewhere, or with ``PARTSONG_SPAWN=1``, each rank is started from scratch.

    Args:
        fn: a function defined at the top level of an importable module; it and `args` are pickled.
        nproc: number of ranks, at least 1.
        *args: its arguments.

    Raises:
        ArgumentError: `nproc` is not a positive integer, or `fn` cannot be pickled.
        PartsongError: a rank raised it; a note gives the rank and its traceback.
        RankError: a rank raised some other error, was killed, or exited; names the rank.

    Example:
        >>> launch(max, 1, [3, 5])
        5
    """
    check_value("nproc", nproc, Count, "number of ranks: ")
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"{getattr(fn, '__qualname__', fn)!r} or its arguments cannot be sent to another process ({error}); "
            "define the function at the top level of a module and pass plain values"
        ) from error
    run = _Run(nproc, payload)
    try:
        run.start()
        return run.watch()
    finally:
        run.end()


@dataclass
class _Run:
    nproc: int
    payload: bytes
    store: Any = None
    children: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    reports: dict[int, RankReport] = field(default_factory=dict)

    def start(self) -> None:
        from torch.distributed import TCPStore

        # Port 0 lets the system choose, so two runs never compete for a port.
        # torch for Windows is built without libuv.
        has_libuv = sys.platform != "win32"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=has_libuv)
        self.store.set("partsong/launched", "1")
        context = _context()
        threads = threads_per_rank(self.nproc)
        for rank in range(self.nproc):
            mine, theirs = context.Pipe(duplex=False)
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.nproc),
                "LOCAL_WORLD_SIZE": str(self.nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "USE_LIBUV": str(int(has_libuv)),
                "OMP_NUM_THREADS": threads,
            }
            if sys.platform == "linux":
                # All ranks are on this machine: no port on an outer interface, and no look-up of the host's name.
                environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
            child = context.Process(
                target=_child, args=(self.payload, environment, theirs), name=f"rank {rank}", daemon=True
            )
            with changed_environment(environment):  # a spawned child reads it while it imports torch
                child.start()
            theirs.close()
            self.children.append(child)
            self.pipes.append(mine)

    def watch(self) -> Any:
        running = set(range(self.nproc))
        deadline = None
        while running:
            silent = [self.pipes[rank] for rank in running if rank not in self.reports]
            ends = [self.children[rank].sentinel for rank in running]
            wait([*silent, *ends], None if deadline is None else max(0.0, deadline - time.monotonic()))
            for rank in sorted(running):
                is_alive = self.children[rank].is_alive()
                self._collect(rank)
                running -= set() if is_alive else {rank}
            if deadline is None and any(self._failed(rank) for rank in range(self.nproc)):
                # Once ranks have found the cause, the others have nothing to add.
                deadline = time.monotonic() + (BLAMED_GRACE if is_blamed(self.store) else GRACE)
            if deadline is not None and time.monotonic() >= deadline:
                break
        failed = [rank for rank in range(self.nproc) if self._failed(rank)]
        if failed:
            raise first_cause(failed, self.reports, self.store, self._died)
        return self.reports[0].value

    def _collect(self, rank: int) -> None:
        if rank in self.reports:
            return
        try:
            if self.pipes[rank].poll():
                self.reports[rank] = pickle.loads(self.pipes[rank].recv_bytes())  # our own child's report
        except (EOFError, OSError):
            pass  # the child died before it could report; its exit code says how

    def _failed(self, rank: int) -> bool:
        report, code = self.reports.get(rank), self.children[rank].exitcode
        return code is not None if report is None else report.error is not None

    def _died(self, rank: int) -> str:
        code = self.children[rank].exitcode or 0
        return (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code} without a result"
        )

    def end(self) -> None:
        for stop, patience in ((BaseProcess.terminate, 1.0), (BaseProcess.kill, 2.0)):
            for child in self.children:
                if child.is_alive():
                    stop(child)
            deadline = time.monotonic() + patience
            for child in self.children:
                child.join(max(0.0, deadline - time.monotonic()))
        for pipe in self.pipes:
            pipe.close()
        self.store = None


def _context() -> Any:
    """Chooses how ranks start: forked from a process that has imported torch and diffusers once, or spawned.

    Importing takes seconds of processor time, which a fork server spends once instead of once per rank. But a process
    that has looked for GPUs must not be forked, and an import may do that. So with CUDA, ranks are spawned.
    """
    from torch import cuda

    if sys.platform != "linux" or cuda.is_available() or "PARTSONG_SPAWN" in os.environ:
        return multiprocessing.get_context("spawn")
    return context_with()


def _child(payload: bytes, environment: dict[str, str], pipe: Connection) -> None:
    _die_with_parent()
    # A fork server keeps the environment variables from when it was started.
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    hide_if_parent_does()
    import torch
    from tqdm import tqdm

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    # tqdm's own lock is a semaphore shared between processes, which a rank that ends abruptly would leak.
    tqdm.set_lock(threading.RLock())
    try:
        fn, args = pickle.loads(payload)  # pickled by our own parent
        value = fn(*args)
        _send(pipe, RankReport(value if environment["RANK"] == "0" else None))
    except BaseException as error:  # noqa: BLE001 - the parent must learn of any error that ends this rank
        _send(pipe, RankReport(error=portable(error), trace=traceback.format_exc()))
        # Peers may be blocked on this rank, so it exits at once instead of waiting for them at shutdown.
        sys.stderr.flush()
        os._exit(1)
    finally:
        pipe.close()


def _send(pipe: Connection, report: RankReport) -> None:
    pipe.send_bytes(pickle.dumps(report))


def portable(error: BaseException) -> BaseException:
    """Returns an error that can be sent to another process: the same one, or a description."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception that does not survive pickling can fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    """Ends this process when the launching one ends, however that happens.

    Linux signals the end of the process this one was forked from. That may be a fork server, which can outlive the
    launching process, so a thread also watches the launching process.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)
    end_with_parent()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch of the launching process", daemon=True).start()
