"""Lets gloo behave to the host as NCCL does: a wait for a message returns at once, and a dead peer ends nothing.

What the host reads from the device later is where it stands when a message does not arrive: outside of any operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from partsong.evals.gpu import drills
from partsong.parallel.ranks import collectives
from partsong.parallel.ranks.mesh import Axis, Mesh

__all__ = ["drill", "nccl_like"]


class Handle:
    """Stands for NCCL's handle of a message, which another thread waits for."""

    def __init__(self, work: Any) -> None:
        self.arrived = threading.Event()
        threading.Thread(target=self._follow, args=(work,), daemon=True).start()

    def _follow(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError:  # NCCL does not notice that a peer is gone: its kernel waits on
            return
        self.arrived.set()

    def wait(self, *limit: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.arrived.is_set()


def _handles(call: Callable[..., Any]) -> Callable[..., Any]:
    def posted(*args: Any, **kwargs: Any) -> Any:
        works = call(*args, **kwargs)
        return [Handle(work) for work in works] if isinstance(works, list) else works and Handle(works)

    return posted


@contextmanager
def nccl_like() -> Iterator[None]:
    """Lets every message of this process be one that the host does not wait for."""
    make_axis, wait = Mesh._make_axis, collectives.Pending.wait

    def fused(mesh: Mesh, names: tuple[str, ...]) -> Axis:
        axis = make_axis(mesh, names)
        return replace(axis, is_fused=axis.size > 1)

    def read(pending: collectives.Pending) -> None:
        for work in pending._works:
            work.arrived.wait()
        wait(pending)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Mesh, "_make_axis", fused))
        stack.enter_context(mock.patch.object(collectives.Pending, "wait", read))
        for name in ("batch_isend_irecv", "all_to_all_single", "all_reduce", "all_gather_into_tensor"):
            stack.enter_context(mock.patch.object(dist, name, _handles(getattr(dist, name))))
        yield


def drill(how: str, file: str) -> None:
    """Runs one drill of ``make gpu`` on this rank."""
    with nccl_like():
        drills._on_rank(how, "cpu", file)
