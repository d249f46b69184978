"""Distributes attention heads to ranks by the work that they were in the call before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.parallel.ranks.collectives import Pending, all_gather
from partsong.parallel.ranks.mesh import Axis

__all__ = ["HeadDealer", "deal"]

#: Bytes of a head's work in a message.
WORK_BYTES = 4


def deal(work: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Gives every rank its number of heads so that the ranks' sums of work are nearly equal.

    The heaviest head that is left goes to the rank that has least and still has room.

    Args:
        work: of each head.
        rooms: how many heads each rank gets; as many as there are heads in all.

    Returns:
        The heads of the first rank, then those of the next, each in ascending order.

    Example:
        >>> deal([9, 8, 1, 2], [2, 2])
        [0, 2, 1, 3]
    """
    hands: list[list[int]] = [[] for _ in rooms]
    for head in sorted(range(len(work)), key=lambda head: (-work[head], head)):
        open_ranks = [rank for rank, room in enumerate(rooms) if len(hands[rank]) < room]
        hands[min(open_ranks, key=lambda rank: (sum(work[other] for other in hands[rank]), rank))].append(head)
    return [head for hand in hands for head in sorted(hand)]


class HeadDealer:
    """Keeps what every head of every layer was as work, and deals by it when the layer is called again.

    The numbers travel while the model goes on, and are read once in a call of the model, so that a GPU's host waits for
    them once.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._orders: dict[int, list[int]] = {}
        self._sent: dict[int, tuple[Pending, Tensor]] = {}
        self._asked: set[int] = set()
        self._places: dict[int, tuple[list[int], Tensor, Tensor]] = {}

    def order(self, layer: int, heads: int) -> list[int]:
        """Returns the heads in the order in which ranks take them."""
        if layer in self._asked:
            self._read()
        self._asked.add(layer)
        order = self._orders.get(layer, [])
        if len(order) != heads:  # the layer's first call, or another model's
            order = self._orders[layer] = list(range(heads))
        return order

    def places(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the last `order` as indices on a device, and those that undo it; made once for an order."""
        order = self._orders[layer]
        if layer not in self._places or self._places[layer][0] != order:
            back = sorted(range(len(order)), key=order.__getitem__)
            self._places[layer] = order, torch.tensor(order, device=device), torch.tensor(back, device=device)
        return self._places[layer][1:]

    def send(self, layer: int, work: Tensor) -> None:
        """Sends what this rank's heads were as work, int32 `[heads]`, in the order of the last `order`."""
        sizes = self._axis.split(len(self._orders[layer]))
        every = work.new_empty(sum(sizes))
        every.split(list(sizes))[self._axis.index].copy_(work)
        self._sent[layer] = all_gather(self._axis, every, sizes, name="work of heads"), every

    def abandon(self) -> None:
        """Forgets everything, and drops pending messages without waiting."""
        for kept in (self._orders, self._sent, self._asked):
            kept.clear()

    def _read(self) -> None:
        self._asked.clear()
        for pending, _ in self._sent.values():
            pending.wait()
        sent = {layer: every for layer, (_, every) in self._sent.items() if not every.is_meta}
        self._sent.clear()
        if not sent:
            return
        numbers = torch.cat(list(sent.values())).tolist()
        for layer, every in sent.items():
            by_place, numbers = numbers[: len(every)], numbers[len(every) :]
            work = [number for _, number in sorted(zip(self._orders[layer], by_place, strict=True))]
            self._orders[layer] = deal(work, self._axis.split(len(work)))
