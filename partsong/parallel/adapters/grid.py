"""Describes where latents have their frames, rows and columns, and in which order these become tokens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHANNELS_LAST", "FRAMES_FIRST", "LatentGrid", "IDS", "PICTURE", "SHAPES", "VIDEO"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentGrid:
    """Says how the tokens of a picture or a video lie in its latent: frame by frame, row by row.

    Either the latent has a dimension for each, in patches of the configured ``patch_size`` and of what `Frames.patch`
    names, or its tokens come in one dimension, `[B, L, C]`, beside an argument that tells rows and columns.

    Attributes:
        dims: the dimensions of the sample, and of what the model returns, that count rows and columns, or frames,
            rows and columns; empty where its tokens come in one dimension.
        positions: the argument `[..., L, n]` with the row second and the column third in the position of every token.
        shapes: the argument that lists for every sample the frames, rows and columns of each of its pictures.
        sides: the arguments with the number of frames, rows and columns.
    """

    dims: tuple[int, ...] = ()
    positions: str | None = None
    shapes: str | None = None
    sides: tuple[str, ...] = ()


#: Pictures `[B, C, H, W]`; videos `[B, C, F, H, W]`, `[B, F, C, H, W]` and `[B, F, H, W, C]`.
PICTURE, VIDEO = LatentGrid(dims=(2, 3)), LatentGrid(dims=(2, 3, 4))
FRAMES_FIRST, CHANNELS_LAST = LatentGrid(dims=(1, 3, 4)), LatentGrid(dims=(1, 2, 3))
#: Packed tokens.
IDS, SHAPES = LatentGrid(positions="img_ids"), LatentGrid(shapes="img_shapes")
