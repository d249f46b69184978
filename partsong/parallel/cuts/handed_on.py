"""Hands on what passes between runs of a model's blocks on different ranks, and shares what the last one returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.samples import map_samples, samples_of
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis

__all__ = ["check_returned", "hand_on", "share_output"]


def hand_on(
    axis: Axis, sender: int, receiver: int, values: tuple[Tensor, ...], *, name: str
) -> tuple[tuple[Tensor, ...], Pending]:
    """Sends what enters a run of blocks from the rank that has made it to the one that runs them.

    Every rank of the axis calls it, in the same order: messages are numbered by it.

    Args:
        axis: the ranks.
        sender: index of the rank that has made the values.
        receiver: index of the rank that needs them.
        values: what enters the run on this rank; on the receiver of the right shapes only.
        name: what errors call the message.

    Returns:
        On the receiver room for the values, which are there once the message has come, elsewhere what was given; and
        the message.

    Raises:
        UnsupportedError: the values are of several types.
    """
    if len({tensor.dtype for tensor in values}) > 1:
        raise UnsupportedError(f"{name}: its blocks hand on tensors of several types; use Ulysses or ShardedWeights")
    if axis.index != receiver:
        # A copy: the model may go on to change in place what is on its way.
        sends = {receiver: torch.cat([tensor.flatten() for tensor in values])} if axis.index == sender else {}
        return values, exchange(axis, sends, {}, name=name)
    sizes = [tensor.numel() for tensor in values]
    flat = values[0].new_empty(sum(sizes))
    pending = exchange(axis, {}, {sender: flat}, name=name)
    return tuple(part.view(like.shape) for part, like in zip(flat.split(sizes), values, strict=True)), pending


def share_output(axis: Axis, owner: int, output: Any, *, name: str) -> Any:
    """Sends every rank what the model returned on one of them.

    Args:
        axis: the ranks.
        owner: index of the rank whose output is right.
        output: what the model returned on this rank; elsewhere of the right shapes only.
        name: what errors call the message.
    """
    if axis.size == 1:
        return output
    is_mine, others = axis.index == owner, [peer for peer in range(axis.size) if peer != owner]
    parts = [part.contiguous() if is_mine else _room_like(part) for part in samples_of(output)]
    for part in parts:
        sends = dict.fromkeys(others, part) if is_mine else {}
        exchange(axis, sends, {} if is_mine else {owner: part}, name=name).wait()
    remaining = iter(parts)
    return map_samples(output, lambda _: next(remaining))


def check_returned(model: str, block: str, output: Any, names: tuple[str, ...]) -> None:
    """Refuses a block that returns another number of values than its row says.

    Raises:
        UnsupportedError: names the block and the values.
    """
    count = len(output) if isinstance(output, tuple) else 1
    if count != len(names):
        raise UnsupportedError(
            f"{model}: block {block} returns {count} values where {' and '.join(names)} are expected; its layout has "
            "changed"
        )


def _room_like(part: Tensor) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)
