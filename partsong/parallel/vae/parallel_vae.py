"""The autoencoder on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.ranks.mesh import AXES
from partsong.parallel.strategy import Kind, Strategy
from partsong.parallel.vae.autoencoder import AutoencoderParallel, Half, RowHalf, two_halves
from partsong.parallel.vae.tiles import TileHalf

if TYPE_CHECKING:
    from partsong.parallel.ranks.mesh import Mesh

__all__ = ["ParallelVae"]


class _ByTile:
    """The class of a `ParallelVae`: exact, unless it makes tiles."""

    def __get__(self, strategy: ParallelVae | None, owner: type) -> Kind:
        return "exact" if strategy is None or strategy.tile is None else "approximate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelVae(Strategy):
    """Shares the autoencoder's work out over all ranks, whatever the other strategies use them for. Exact.

    The image is cut into rows, one run per rank: convolutions get the neighbours' border rows, group norms the
    statistics of the whole image, attention all keys and values. Every rank holds only its rows of the large feature
    maps, and returns the whole result. Any number of ranks and any height, decoding as well as encoding.

    It has no axis of its own. Ranks that no other strategy takes become ``data`` ranks, which share out the batch of
    the denoiser; with one image they all compute the same there.

    With `tile` the image is cut into overlapping tiles instead, each computed on its own and blended linearly where
    they overlap: approximate, for autoencoders that cannot be cut into rows or for less memory than a rank's rows
    need. With a tile of at least the latent's height it is exact.

    Args:
        tile: latent rows of a tile; None cuts rows exactly.
        overlap: latent rows that neighbouring tiles share, at most half a tile; None is a quarter of a tile.

    Source: rows as in DistriFusion, arXiv 2402.19481, waited for; tiles as in diffusers' ``enable_tiling``.

    Example:
        >>> ParallelVae().kind, ParallelVae(tile=32).kind
        ('exact', 'approximate')
    """

    # A plan asks an instance, tables ask the class: what it is without knobs.
    kind: ClassVar[Kind] = cast(Kind, _ByTile())
    denoises: ClassVar[bool] = False

    tile: int | None = None
    overlap: int | None = None

    def validate(self) -> None:
        """Refuses tiles without rows, overlaps of more than half a tile, and an overlap without tiles."""
        for name, least in (("tile", 1), ("overlap", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ArgumentError(f"ParallelVae: {name}={value!r}; use {least} or more, or leave it out")
        if self.overlap is not None and (self.tile is None or 2 * self.overlap > self.tile):
            most = "none without a tile" if self.tile is None else f"at most {self.tile // 2}, half a tile"
            raise ArgumentError(f"ParallelVae: overlap={self.overlap}, tile={self.tile}; use {most}")

    def codes(self, target: Any, mesh: Mesh) -> AutoencoderParallel | None:
        """Its work on a pipeline's autoencoder, or on an autoencoder itself; None where one rank has all of it.

        Raises:
            UnsupportedError: there is no autoencoder, or it cannot be cut.
        """
        vae = target if isinstance(target, nn.Module) else getattr(target, "vae", None)
        found = two_halves(vae)
        if not found:
            raise UnsupportedError(f"ParallelVae: {type(target).__name__} has no autoencoder to cut; drop ParallelVae")
        axis = mesh.axis(*AXES)
        if axis.size == 1:
            return None
        halves = {name: (module, self._half(vae, name, module, mesh)) for name, module in found.items()}
        return AutoencoderParallel(axis, halves)

    def _half(self, vae: Any, name: str, module: nn.Module, mesh: Mesh) -> Half:
        axis = mesh.axis(*AXES)
        if self.tile is None:
            return RowHalf(module, axis, "picture" if name == "encoder" else "latent")
        overlap = self.tile // 4 if self.overlap is None else self.overlap
        return TileHalf(vae, axis, self.tile, overlap, encodes=name == "encoder")
