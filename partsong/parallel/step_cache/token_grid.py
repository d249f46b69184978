"""Finds the grid that the tokens of a picture or a video lie on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter

__all__ = ["Grid", "no_grid", "token_grid"]

#: Frames, rows and columns of tokens, which lie row after row and frame after frame.
Grid = tuple[int, int, int]


def token_grid(adapter: Adapter, config: Mapping[str, Any], named: Mapping[str, Any], tokens: int) -> Grid:
    """Finds the grid of the picture that a call is about; tokens of pictures to go by may follow it.

    Args:
        adapter: the model's row.
        config: its configuration, which says how many pixels of the latents make a token.
        named: its arguments, before they are cut over ranks.
        tokens: how many tokens its first block gets.

    Raises:
        UnsupportedError: the call does not say how its tokens lie.
    """
    grid: tuple[Any, ...] | None
    shapes, ids, total = named.get("img_shapes"), named.get("img_ids"), None
    if shapes is not None:
        grid, total = _first_shape(shapes)
    elif adapter.frames is not None and adapter.frames.sides:
        grid = tuple(named.get(name or "") for name in (adapter.frames.argument, *adapter.frames.sides))
    elif isinstance(ids, Tensor):
        grid, total = _grid_of_ids(ids), ids.shape[-2]
    else:
        grid = _patches(adapter, config, named[adapter.sample])
    if grid is not None and len(grid) == 3 and None not in grid:
        frames, rows, columns = (int(side) for side in grid)
        if (frames * rows * columns if total is None else total) == tokens:
            return frames, rows, columns
    raise no_grid(adapter, tokens)


def no_grid(adapter: Adapter, tokens: int) -> UnsupportedError:
    """Makes the error for tokens whose places are not known."""
    return UnsupportedError(
        f'StepCache(measure="spectral") on {adapter.model}: its {tokens} tokens are no whole grid of frames, rows and '
        'columns that the call names, so they have no spectrum; use measure="first_block"'
    )


def _first_shape(shapes: Any) -> tuple[tuple[Any, ...], int]:
    """Returns the shape of the picture that is made, the first of a sample's, and the tokens of all of them."""
    own = [shapes[0]] if isinstance(shapes[0][0], int) else shapes[0]
    return tuple(own[0]), sum(math.prod(shape) for shape in own)


def _grid_of_ids(ids: Tensor) -> tuple[int, int, int] | None:
    """Reads the grid from positions `[L, 3]` of frame, row and column; None where they are not in its order."""
    rows = [tuple(row[:3]) for row in (ids[0] if ids.ndim == 3 else ids).tolist()]
    first = rows[0]
    own = [row[1:] for row in rows if row[0] == first[0]]
    columns = next((count for count, row in enumerate(own) if row[0] != own[0][0]), len(own))
    in_order = [(own[0][0] + place // columns, own[0][1] + place % columns) for place in range(len(own))]
    return (1, len(own) // columns, columns) if own == in_order and len(own) % columns == 0 else None


def _patches(adapter: Adapter, config: Mapping[str, Any], sample: Any) -> tuple[int, ...] | None:
    """Counts the patches of latents `[B, C, H, W]` or, with frames at some dimension, of five; None for others."""
    if not isinstance(sample, Tensor) or sample.ndim not in (4, 5):
        return None
    frames = 1
    if sample.ndim == 5:
        frames = sample.shape[2 if adapter.frames is None else adapter.frames.dim]
    size = config.get("patch_size") or 1
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) == 2:
        sizes = (config.get("patch_size_t") or 1, *sizes)
    lengths = (frames, *sample.shape[-2:])
    return tuple(math.ceil(length / each) for length, each in zip(lengths, sizes, strict=True))
