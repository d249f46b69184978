"""Adds up tensors over the ranks of one axis, to the same bits on all of them."""

from __future__ import annotations

from torch import Tensor

from partsong.parallel.ranks.collectives import all_gather, all_to_all, fused_sum
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["sum_over", "sum_sends"]


def sum_over(axis: Axis, part: Tensor, *, name: str = "sum") -> Tensor:
    """Returns the sum of every rank's tensor; it may use the memory of `part`.

    Two ranks swap their tensors. More of them add up a share each, in the order of ranks, and gather the shares.

    Args:
        axis: the ranks taking part.
        part: this rank's tensor; all are of one shape.
        name: what errors call it.
    """
    if axis.size == 1:
        return part
    part = part.contiguous()
    if axis.is_fused:
        fused_sum(axis, part, sum_sends(part.numel(), axis.size, axis.index), name=name)
        return part
    if axis.size == 2:
        other = part.new_empty(part.shape)
        all_to_all(axis, [part, part], [other, other], name=name).wait()
        return part if axis.dry else part.add_(other)  # the sum of two has the same bits in either order
    sizes = split_sizes(part.numel(), axis.size)
    start, mine = offsets(sizes)[axis.index], sizes[axis.index]
    flat = part.view(-1)
    arrived = flat.new_empty((axis.size, mine))
    all_to_all(axis, flat.split(list(sizes)), arrived.unbind(0), name=name).wait()
    if not axis.dry:
        arrived[axis.index] = flat.narrow(0, start, mine)
        total = arrived[0]
        for other in arrived[1:]:
            total += other
        flat.narrow(0, start, mine).copy_(total)
    all_gather(axis, flat, sizes, name=name).wait()
    return part


def sum_sends(numel: int, size: int, index: int) -> int:
    """Returns how many numbers the rank at `index` of `size` sends to add up tensors of `numel` numbers."""
    if size < 3:
        return numel * (size - 1)
    mine = split_sizes(numel, size)[index]
    return numel - mine + mine * (size - 1)
