"""Passes key/value blocks around the ranks while each computes on the one it has (arXiv 2310.01889)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partsong.kernels import attention
from partsong.knobs import Count
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage, own_rows
from partsong.parallel.exchange.key_blocks import empty_block, unpack_keys_values, write_keys_values
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import ring_exchange
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["Ring", "RingStage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Strategy):
    """Splits tokens over ranks and passes key/value blocks from rank to rank. Exact.

    The next block is under way while the current one is computed, and each block's attention continues from the result
    so far by its log-sum-exp. Takes any number of heads, also fewer than ranks, and memory for two blocks of keys.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: Ring Attention, arXiv 2310.01889.
    """

    axes: ClassVar[tuple[str, ...]] = ("ring",)

    degree: Count | None = None

    def stages(self, mesh: Mesh, clock: StepClock) -> list[RingStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [RingStage(mesh.axis("ring"))]


class RingStage(Stage):
    """Attends to one key/value block after the other, as they come around."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the blocks of all ranks; `inner` is not needed."""
        k, v, total, pending = call.k, call.v, None, None
        block = empty_block(k, k.shape[2])
        write_keys_values(block, k, v)
        for turn in range(self.axis.size):
            owner = (self.axis.index - turn) % self.axis.size
            if turn < self.axis.size - 1:
                size = call.sizes[(owner - 1) % self.axis.size]
                incoming = block.new_empty((size, *block.shape[1:]))
                pending = ring_exchange(self.axis, block, incoming, name="ring attention")
            total = _attend(call, k, v, owner, total)
            if turn < self.axis.size - 1:
                assert pending is not None
                pending.wait()
                block = incoming
                k, v = unpack_keys_values(block)
        assert total is not None
        return total[0].to(call.q.dtype)

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Returns the bytes this rank sends: its own block, then every block it passes on."""
        size, unit = self.axis.size, shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        return sum(shape.sizes[(shape.index - turn) % size] for turn in range(size - 1)) * unit, shape


def _attend(
    call: AttentionCall, k: Tensor, v: Tensor, owner: int, total: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Adds the block of rank `owner` to the result so far."""
    masks = own_rows(call)
    mask = None if masks is None else masks[owner]
    keep, bias = (mask, None) if mask is None or mask.dtype == torch.bool else (None, mask)
    out, lse = attention(call.q, k, v, mask=keep, bias=bias, scale=call.scale, init=total)
    # In half precision every turn would round the total once more.
    return out.to(lse.dtype), lse
