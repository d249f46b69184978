"""Gathers the keys and values of all ranks before an attention."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from partsong.parallel.attention_call import AttentionCall, AttentionShape, Inner, Stage
from partsong.parallel.exchange.key_blocks import empty_block, unpack_keys_values, write_keys_values
from partsong.parallel.ranks.collectives import all_gather
from partsong.parallel.ranks.mesh import Axis

__all__ = ["GatherStage"]


class GatherStage(Stage):
    """Attends to the keys and values of all ranks, gathered."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Attends with the local queries to the keys of all ranks; `inner` computes it."""
        whole = empty_block(call.k, sum(call.sizes))
        write_keys_values(whole.split(list(call.sizes))[call.index], call.k, call.v)
        all_gather(self.axis, whole, call.sizes, name="gather of keys and values").wait()
        k, v = unpack_keys_values(whole)
        return inner(replace(call, k=k, v=v, sizes=(sum(call.sizes),), index=0))

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends: its keys and values to every other rank."""
        unit = shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        return shape.sizes[shape.index] * unit * (self.axis.size - 1), (shape,)
