"""Lets one process be the first of several ranks that all do what it does: what it sends comes back as theirs.

So the steps of a plan run in one process on one GPU, where they can be watched, with every copy and kernel around a
message. Where ranks send tensors of other sizes, zeros arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from partsong.evals.gpu.host_cost import Arrived
from partsong.parallel import Mesh, Strategy, mesh_for
from partsong.parallel.ranks.health import Heartbeat

__all__ = ["mirrored"]


@contextmanager
def mirrored(ranks: int, mix: Sequence[Strategy], device: str) -> Iterator[Mesh]:
    """Makes this process the first of some ranks within a block, and opens the mesh of some strategies."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    posts = {
        "batch_isend_irecv": _point_to_point,
        "all_to_all_single": _all_to_all,
        "all_gather_into_tensor": _all_gather,
        "all_reduce": _all_reduce,
        "all_gather_object": _gather_objects,
    }
    Heartbeat.current = Heartbeat(None, 0, ranks)  # there is nobody to watch
    try:
        with contextlib.ExitStack() as stack:
            for name, post in posts.items():
                stack.enter_context(mock.patch.object(dist, name, post))
            yield stack.enter_context(Mesh(**mesh_for(mix, ranks), device=device))
    finally:
        Heartbeat.current = None
        dist.destroy_process_group()


def _copy(target: Tensor, source: Tensor | None) -> None:
    """Fills what is received."""
    if source is None or source.numel() != target.numel():
        target.zero_()
    else:
        target.copy_(source.view(target.shape))


def _point_to_point(posts: Sequence[dist.P2POp]) -> list[Any]:
    sent = [post.tensor for post in posts if post.op is dist.isend]
    for post in posts:
        if post.op is dist.irecv:
            fitting = (place for place, tensor in enumerate(sent) if tensor.numel() == post.tensor.numel())
            place = next(fitting, None)
            _copy(post.tensor, None if place is None else sent.pop(place))
    return [Arrived()]


def _all_to_all(recv: Tensor, send: Tensor, *sizes: Any, **options: Any) -> Any:
    _copy(recv, send)
    return Arrived()


def _all_gather(buffer: Tensor, own: Tensor, **options: Any) -> Any:
    parts = buffer.view(-1, own.numel())
    for part in parts[1:]:  # the first one is this rank's own
        part.copy_(own.reshape(-1))
    return Arrived()


def _all_reduce(part: Tensor, **options: Any) -> Any:
    part.mul_(dist.get_world_size(options.get("group")))
    return Arrived()


def _gather_objects(target: list[Any], value: Any, **options: Any) -> None:
    target[:] = [value] * len(target)
