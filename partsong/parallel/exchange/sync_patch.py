"""Synchronous patch parallelism: every rank waits for fresh keys, values, border rows and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from partsong.parallel.cuts.tokens import AttentionCall, AttentionShape, Stage
from partsong.parallel.exchange.ring import unpack_keys_values, write_keys_values
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import all_gather
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.strategy import Strategy

__all__ = ["GatherStage", "SyncPatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPatch(Strategy):
    """Splits the image into patches, one per rank, that wait for each other wherever the model looks across. Exact.

    On a UNet a patch is a run of rows: convolutions get the neighbours' border rows, group norms the statistics of
    the whole image (with torch's biased variance), and self-attention all keys and values. On a transformer it is a
    run of tokens, and only self-attention looks across. Any number of ranks, rows that do not divide, any batch.

    Every rank holds the keys and values of one layer at a time; `Ring` needs less memory and hides the way, `Ulysses`
    moves less.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: the synchronous form of DistriFusion, arXiv 2402.19481.

    Example:
        >>> SyncPatch(degree=3).kind
        'exact'
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)

    degree: int | None = None

    def stages(self, mesh: Mesh, clock: StepClock) -> Sequence[Stage]:
        """The attention stages this strategy adds to a plan."""
        return [GatherStage(mesh.axis("patch"))]


class GatherStage:
    """Attends to the keys and values of all ranks, gathered."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def run(self, call: AttentionCall, inner: Any) -> Tensor:
        """Attention of the local queries to everybody's keys; `inner` computes it."""
        batch, heads, _, dim = call.k.shape
        whole = call.k.new_empty((sum(call.sizes), batch, 2, heads, dim))
        start = offsets(call.sizes)[call.index]
        write_keys_values(whole[start : start + call.sizes[call.index]], call.k, call.v)
        all_gather(self.axis, whole, call.sizes, name="gather of keys and values").wait()
        k, v = unpack_keys_values(whole)
        return inner(replace(call, k=k, v=v, sizes=(sum(call.sizes),), index=0))

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Bytes this rank sends: its keys and values to every other rank."""
        unit = shape.batch * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        return shape.sizes[shape.index] * unit * (self.axis.size - 1), shape
