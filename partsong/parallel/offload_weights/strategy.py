"""Keeps blocks' weights in the host's memory and copies them in chunks that yield to exchanges (arXiv 2605.11335)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from partsong.errors import UnsupportedError
from partsong.knobs import AboveZero, Share
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.block_lists import READ_FROM_OUTSIDE
from partsong.parallel.cuts.block_units import find_units
from partsong.parallel.offload_weights.host_weights import HostWeights
from partsong.parallel.protocols import Shards
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["OffloadWeights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadWeights(Strategy):
    """Keeps the weights of blocks in the host's memory, and copies each block while the one before it runs. Exact.

    A rank's device holds the share `resident` of all blocks, and room for two blocks. The copies of a block hide behind
    the computation of the one before it where they take no longer: bytes of the rest of a block, divided by those that
    the bus moves in a second. On cards without a link of their own, exchanges between ranks go over the same bus, so
    blocks are copied in chunks, and between two chunks the copying yields to an exchange.

    It needs no other rank and no axis, and works beside every strategy whose ranks have whole weights. Each rank keeps
    all weights in the host's memory. Call `parallelize` before you move the pipeline to its device: then blocks never
    are on it all together. `Plan.undo` puts the weights of blocks back where they were at that time.

    Use it when the weights do not fit one device, and ranks are few or their links slow.

    Args:
        resident: share of the bytes of each block that stays on the device. Whole weights stay, the largest that fit
            into the share, so it may be a little less. "auto" begins with 0, and from the second call of the model on
            lets as many stay as half of the memory that the first has left, so that decoding finds the other half.
            ``partsong plan`` predicts the largest share that fits.
        chunk_mb: size of a chunk in MiB: the copying yields as soon as the current chunk is through.

    Source: ChunkFlow, arXiv 2605.11335.

    Example:
        >>> OffloadWeights(resident=0.5).kind
        'exact'
    """

    offloads: ClassVar[bool] = True

    resident: Share | Literal["auto"] = 0.0
    chunk_mb: AboveZero = 16.0

    def composes(self, other: Strategy) -> bool:
        """Says that it runs beside strategies whose ranks have whole weights and the pipeline's own loop."""
        return not (other.has_loop or other.cuts_weights or other.cuts_blocks)

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models that read a block's weights outside of the block, or choose among blocks sample by sample."""
        if adapter.model in READ_FROM_OUTSIDE:
            return "it reads a layer of its first block outside of that block; use enable_model_cpu_offload()"
        if adapter.mixes:
            return "each sample takes experts of its own, so blocks have no order; use ExpertParallel"
        return None

    def shards(self, module: nn.Module, adapter: Adapter, mesh: Mesh, lent: Collection[nn.Module]) -> Shards:
        """Returns the weights of the blocks.

        Raises:
            UnsupportedError: the model has no list of blocks, or weights of a kind that cannot be offloaded, or the
                device has no memory of its own.
        """
        reason = self.refuses(adapter)
        if mesh.device.type == "mps":
            reason = "the GPU of a Mac has no memory of its own; drop it"
        if reason is not None:
            raise UnsupportedError(f"OffloadWeights on {adapter.model}: {reason}")
        share = None if self.resident == "auto" else self.resident
        units = find_units(module, adapter, lent, nested=False, by="OffloadWeights")
        return HostWeights(module, units, mesh, share=share, chunk_bytes=max(1, int(self.chunk_mb * 2**20)))
