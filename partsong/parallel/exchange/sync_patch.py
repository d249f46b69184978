"""Splits an image into patches; ranks wait for fresh keys, values, border rows and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partsong.knobs import Count
from partsong.parallel.attention_call import Stage
from partsong.parallel.exchange.gather import GatherStage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["SyncPatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPatch(Strategy):
    """Splits the image into patches, one per rank, that wait for each other wherever the model looks across. Exact.

    On a UNet a patch is a run of rows: convolutions get the neighbours' border rows, group norms the statistics of the
    whole image (with torch's biased variance), and self-attention all keys and values. On a transformer it is a run of
    tokens, and only self-attention looks across. The rows need not divide by the number of ranks.

    Every rank holds the keys and values of one layer at a time. `Ring` needs less memory and computes while messages
    travel, and `Ulysses` moves fewer bytes.

    Use it when a Stable Diffusion UNet has to give the same picture as on one rank.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: the synchronous form of DistriFusion, arXiv 2402.19481.
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("patch",)

    degree: Count | None = None

    def stages(self, mesh: Mesh, clock: StepClock) -> Sequence[Stage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [GatherStage(mesh.axis("patch"))]
