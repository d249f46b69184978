"""What the workers share: values of all ranks, and distances."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partsong.errors import PartsongError
from partsong.parallel import Mesh

Twin = TypeVar("Twin")
Work = TypeVar("Work", bound=Callable[..., Any])


def staying_connected(work: Work) -> Work:
    """Keeps ranks connected while a function opens one mesh after another: connecting takes longer than most cases."""

    @functools.wraps(work)
    def run(*args: Any, **named: Any) -> Any:
        with Mesh(data=int(os.environ.get("WORLD_SIZE", "1"))):
            return work(*args, **named)

    return run  # type: ignore[return-value]


def on_first(compute: Callable[[], Twin]) -> Twin:
    """What the first rank computes, on every rank: a serial twin on each would cost as much as all that is compared."""
    found: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def refusal(act: Callable[[], Any]) -> str:
    """What an act is refused with; nothing where it is not."""
    try:
        act()
    except PartsongError as problem:
        return str(problem)
    return ""


def gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value)
    return rows


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative distance; infinite for another shape."""
    return ((got - want).double().norm() / want.double().norm()).item() if got.shape == want.shape else float("inf")
