"""Measures what one attention over ranks costs the host: time of its thread, and kernels it launches.

A GPU waits for the host where launching the next kernels takes longer than computing the last ones. One process stands
for the first rank of N. Its messages arrive at once, and the attention kernel returns memory that nobody fills, so what
is left is partsong's Python and PyTorch's dispatch of the kernels around it. Posting messages is left out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from partsong.kernels import dispatch
from partsong.kernels.backends.cuda import align_rows, normalise
from partsong.kernels.call import HALF, Call, refusal
from partsong.parallel.attention_call import AttentionCall, Stage, attend_through
from partsong.parallel.exchange.ring import RingStage
from partsong.parallel.exchange.token_ring import TokenRingStage
from partsong.parallel.exchange.ulysses import UlyssesStage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Axis

__all__ = ["CALLS", "RANKS", "REPEATS", "Arrived", "measured"]

RANKS = (2, 4, 8)
#: Flux' heads, on so few tokens that computing takes no time.
HEADS, TOKENS, WIDTH = 24, 2, 8
CALLS, REPEATS = 100, 31
#: Ulysses in one wave, as it is on a GPU where a picture of 1024 x 1024 is made.
STAGES: dict[str, Callable[[Axis], Stage | None]] = {
    "alone": lambda axis: None,
    "Ulysses": lambda axis: UlyssesStage(axis, waves=1),
    "Ring": lambda axis: RingStage(axis, StepClock()),
    "TokenRing": lambda axis: TokenRingStage(axis, StepClock()),
}


class _NoKernel:
    """Does what the rows of fused kernels do around their operator, and no more."""

    usable = staticmethod(lambda: (True, ""))

    @staticmethod
    def supports(call: Call) -> tuple[bool, str]:
        reason = refusal(call, HALF, 128)
        return not reason, reason

    @staticmethod
    def run(call: Call) -> tuple[Tensor, Tensor]:
        q, _, _ = (align_rows(x) for x in (call.q, call.k, call.v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        return normalise(out, lse, q.shape[2], call.bias)


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stands for the fused kernel of `merge`: fresh memory, and one launch."""
    out, lse = parts[0]
    return torch.empty_like(out).copy_(out), torch.empty_like(lse)


def _is_fused(parts: object) -> bool:
    return True


class _Message:
    """Stands for a message that is to be posted, which is PyTorch's own work."""

    def __init__(self, *_: object) -> None:
        pass


class Arrived:
    """Is a message that has arrived."""

    def wait(self, *limit: Any) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Says that it is."""
        return True


_ARRIVED = Arrived()


def _post(ops: object) -> list[Arrived]:
    return [_ARRIVED]


def _exchange(*given: object, **named: object) -> Arrived:
    return _ARRIVED


class _Launches(TorchDispatchMode):
    """Counts operators that start a kernel: all but views and fresh memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(
            argument.alias_info is not None and not argument.alias_info.is_write for argument in _outputs(func)
        )
        self.count += not (is_view or "empty" in func.name())
        return func(*args, **(kwargs or {}))


def _outputs(func: Any) -> Any:
    return func._schema.returns


def _measure(name: str, ranks: int) -> dict[str, Any]:
    """Measures one attention of a strategy on the first of `ranks` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        stage = STAGES[name](Axis("ulysses", tuple(range(ranks)), 0, dist.group.WORLD, is_fused=True))
        stages = [] if stage is None else [stage]
        q, k, v = (torch.zeros(1, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(3))
        call = AttentionCall(0, q, k, v, (TOKENS,) * ranks, 0)
        microseconds = []
        for _ in range(REPEATS + 1):  # the first one warms up
            start = time.thread_time()
            for _ in range(CALLS):
                attend_through(stages, call)
            microseconds.append(1e6 * (time.thread_time() - start) / CALLS)
        with _Launches() as launches:
            attend_through(stages, call)
    finally:
        dist.destroy_process_group()
    return {
        "name": name,
        "ranks": ranks,
        "microseconds": round(min(microseconds[1:]), 1),
        "launches": launches.count,
    }


def measured(ranks: Sequence[int] = RANKS) -> list[dict[str, Any]]:
    """Measures every strategy at some numbers of ranks; microseconds are the least of all runs."""
    fused = sys.modules["partsong.kernels.merge"]  # hidden behind the function of its name
    patches = (
        mock.patch.object(fused, "_is_fused", _is_fused),
        mock.patch.object(fused, "_merged_by_triton", _merge),
        mock.patch.dict(dispatch._BY_DEVICE, cpu=(dispatch._row("none", _NoKernel),)),
        mock.patch.dict(dispatch._chosen, clear=True),
        mock.patch.object(dist, "P2POp", _Message),
        mock.patch.object(dist, "batch_isend_irecv", _post),
        mock.patch.object(dist, "all_to_all_single", _exchange),
    )
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        return [_measure(name, each) for name in STAGES for each in ((1,) if name == "alone" else ranks)]
