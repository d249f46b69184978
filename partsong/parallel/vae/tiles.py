"""Cuts images into overlapping tiles, which are computed one by one and blended where they overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.overlaps import blend_weights
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets

__all__ = ["TileHalf", "tiles"]


def tiles(rows: int, tile: int, overlap: int) -> list[tuple[int, int]]:
    """Returns the first row and the end of each tile; the last may be shorter, but is longer than the overlap.

    Example:
        >>> tiles(10, tile=6, overlap=2)
        [(0, 6), (4, 10)]
    """
    return [(start, min(start + tile, rows)) for start in range(0, max(1, rows - overlap), tile - overlap)]


class TileHalf:
    """Cuts an encoder or decoder into tiles of rows, each on one rank; approximate unless there is one tile.

    Args:
        vae: the autoencoder.
        axis: the ranks; each takes a run of tiles.
        tile: latent rows of a tile.
        overlap: latent rows that two neighbouring tiles share, at most half a tile.
        encodes: whether it is the encoder.
    """

    def __init__(self, vae: Any, axis: Axis, tile: int, overlap: int, encodes: bool) -> None:
        self.vae, self.axis, self.tile, self.overlap = vae, axis, tile, overlap
        # Rows of the image per row of the latent.
        factor = getattr(vae, "spatial_compression_ratio", None) or 2 ** (len(vae.config.block_out_channels) - 1)
        self.taken, self.given = (factor, 1) if encodes else (1, factor)
        self._sent = [0] * axis.size

    def attach(self, hooks: HookSet) -> None:
        """Does nothing, since every tile is computed as a whole."""

    def run(self, forward: Callable[..., Any], named: dict[str, Any], first: str) -> Tensor:
        """Computes this rank's tiles, and blends those of all ranks."""
        image: Tensor = named[first]
        self._check(image, named)
        cut = tiles(image.shape[-2] // self.taken, self.tile, self.overlap)
        counts = self.axis.split(len(cut))
        runs = [cut[start : start + count] for start, count in zip(offsets(counts), counts, strict=True)]
        bounds = [(run[0][0] * self.given, run[-1][1] * self.given) if run else (0, 0) for run in runs]
        compute = lambda tile: forward(**{**named, first: tile})  # noqa: E731
        mine = self._blended(compute, image, runs[self.axis.index] or cut[:1], cut[-1][1])
        sizes = tuple(end - start for start, end in bounds)
        own = sizes[self.axis.index]
        row = mine[..., 0, :].numel() * mine.element_size()
        self._sent = [size * row * (self.axis.size - 1) for size in sizes]
        # A rank without a tile computes the first one for its shape, but does not send it.
        parts = gather_tokens(self.axis, mine[..., :own, :], sizes, mine.ndim - 2, name="gather of the tiles")
        whole = mine.new_zeros((*mine.shape[:-2], cut[-1][1] * self.given, mine.shape[-1]))
        for part, (start, end) in zip(parts.split(list(sizes), dim=-2), bounds, strict=True):
            whole[..., start:end, :] += part
        return whole

    def _blended(
        self, compute: Callable[[Tensor], Tensor], image: Tensor, run: list[tuple[int, int]], last: int
    ) -> Tensor:
        """Adds up a run of weighted tiles, from the first row of the first to the end of the last."""
        total: Tensor | None = None
        size = (run[-1][1] - run[0][0]) * self.given
        for start, end in run:
            rows = compute(image[..., start * self.taken : end * self.taken, :].contiguous())
            self._check_rows(rows, end - start)
            shared = self.overlap * self.given
            weights = blend_weights(rows.shape[-2], shared if start > 0 else 0, shared if end < last else 0)
            total = rows.new_zeros((*rows.shape[:-2], size, rows.shape[-1])) if total is None else total
            place = slice((start - run[0][0]) * self.given, (end - run[0][0]) * self.given)
            total[..., place, :] += rows * weights[:, None].to(rows)
        assert total is not None
        return total

    def _check(self, image: Tensor, named: dict[str, Any]) -> None:
        kind = type(self.vae).__name__
        if named.get("feat_cache") is not None:
            raise UnsupportedError(
                f"{kind} remembers earlier frames, which tiles would mix up; leave tile out, which cuts rows exactly"
            )
        if getattr(self.vae, "use_tiling", False):
            raise UnsupportedError(f"{kind} makes tiles of its own; call disable_tiling(), or leave tile out")
        if image.shape[-2] % self.taken:
            raise UnsupportedError(f"{kind}: {image.shape[-2]} rows are no multiple of {self.taken}")

    def _check_rows(self, rows: Tensor, latent_rows: int) -> None:
        if rows.shape[-2] != latent_rows * self.given:
            raise UnsupportedError(
                f"{type(self.vae).__name__} makes {rows.shape[-2]} rows of {latent_rows * self.taken}, not "
                f"{latent_rows * self.given}; tiles cannot be put together"
            )

    def sent(self) -> list[int]:
        """Returns the bytes each rank sent in the last call."""
        return self._sent
