"""Runs the autoencoder on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count, Whole
from partsong.parallel.ranks.mesh import AXES, Axis, Mesh
from partsong.parallel.strategy import Kind, Strategy
from partsong.parallel.vae.autoencoder import AutoencoderParallel, Half, RowHalf, two_halves
from partsong.parallel.vae.tiles import TileHalf

__all__ = ["ParallelVae"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelVae(Strategy):
    """Shares the autoencoder's work out over all ranks, whatever the other strategies use them for. Exact.

    The image is cut into rows, one run per rank, for encoding and for decoding. Convolutions get the neighbours' border
    rows, group norms the statistics of the whole image, and attention all keys and values. Every rank holds only its
    rows of the large feature maps, and returns the whole result.

    It has no axis of its own. Ranks that no other strategy takes become ``data`` ranks, which share out the batch of
    the denoiser; with one image they all compute the same there.

    With `tile` the image is cut into overlapping tiles instead, which are computed one by one and blended linearly.
    That is approximate, but needs less memory, and suits autoencoders whose rows cannot be cut. A tile as high as the
    latent is exact.

    Use it when decoding a large picture or a video takes long or does not fit one device.

    Args:
        tile: latent rows of a tile; None cuts rows exactly.
        overlap: latent rows that neighbouring tiles share, at most half a tile; None takes a quarter of a tile.

    Source: rows as in the synchronous form of DistriFusion, arXiv 2402.19481; tiles as in diffusers' ``enable_tiling``.

    Example:
        >>> ParallelVae().kind, ParallelVae(tile=32).kind
        ('exact', 'approximate')
    """

    denoises: ClassVar[bool] = False
    uses_all_ranks: ClassVar[bool] = True
    uneven_axes: ClassVar[tuple[str, ...]] = AXES

    tile: Count | None = None
    overlap: Annotated[int, Whole(0)] | None = None

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Says that it is exact, unless it makes tiles."""
        return "exact" if self.tile is None else "approximate"

    def validate(self) -> None:
        """Refuses overlaps of more than half a tile, and an overlap without tiles."""
        super(ParallelVae, self).validate()
        if self.overlap is not None and (self.tile is None or 2 * self.overlap > self.tile):
            most = "overlap=None without a tile" if self.tile is None else f"at most {self.tile // 2}, half a tile"
            raise ArgumentError(f"ParallelVae: overlap={self.overlap}, tile={self.tile}; use {most}")

    def codes(self, target: Any, mesh: Mesh) -> AutoencoderParallel | None:
        """Returns its work on a pipeline's autoencoder or a bare one; None where one rank has all of it.

        Raises:
            UnsupportedError: there is no autoencoder, or it cannot be cut.
        """
        vae = target if isinstance(target, nn.Module) else getattr(target, "vae", None)
        modules = two_halves(vae)
        if not modules:
            raise UnsupportedError(f"ParallelVae: {type(target).__name__} has no autoencoder to cut; drop ParallelVae")
        axis = mesh.axis(*AXES)
        if axis.size == 1:
            return None
        halves = {name: (module, self._half(vae, name, module, axis)) for name, module in modules.items()}
        return AutoencoderParallel(axis, halves)

    def _half(self, vae: Any, name: str, module: nn.Module, axis: Axis) -> Half:
        if self.tile is None:
            return RowHalf(module, axis, "picture" if name == "encoder" else "latent")
        overlap = self.tile // 4 if self.overlap is None else self.overlap
        return TileHalf(vae, axis, self.tile, overlap, encodes=name == "encoder")
