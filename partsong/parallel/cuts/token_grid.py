"""Reads from a call how the tokens of its picture or video lie: how many frames, rows and columns there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.grid import LatentGrid
from partsong.parallel.hooks.known_values import KnownValues

__all__ = ["Lengths", "patch_of", "token_grid"]

#: Frames, rows and columns of a latent, in patches.
Lengths = tuple[int, int, int]


def token_grid(
    adapter: Adapter, config: Mapping[str, Any], named: Mapping[str, Any], known: KnownValues
) -> tuple[Lengths, int]:
    """Returns frames, rows and columns of the picture that is made, and how many tokens the call names in all.

    These are more than those of the picture where others, to go by, follow it.

    Args:
        adapter: the model's row.
        config: its configuration, which says how many numbers of the latent make a token.
        named: its arguments, before they are cut over ranks.
        known: remembers what was read from positions.

    Raises:
        UnsupportedError: the row has no grid, or the call does not say how its tokens lie.
    """
    grid, model = adapter.grid, adapter.model
    if grid is None:
        raise UnsupportedError(f"{model}: its row does not say how its tokens lie in the latent")
    if grid.dims:
        lengths = _patches_of(adapter, config, [named[adapter.sample].shape[dim] for dim in grid.dims])
        return lengths, math.prod(lengths)
    stated = _stated(grid, named, known)
    if stated is None:
        raise UnsupportedError(
            f"{model}: its tokens do not come row after row: there are others among them, such as pictures to go by, "
            "or the call does not say how they lie"
        )
    return stated


def patch_of(adapter: Adapter, config: Mapping[str, Any]) -> Lengths:
    """Returns the frames, rows and columns of the latent in a patch."""
    size, frames = config["patch_size"], adapter.frames
    rows, columns = size[-2:] if isinstance(size, list | tuple) else (size, size)
    time = 1 if frames is None or frames.patch is None else config[frames.patch]
    return (time[0] if isinstance(time, list | tuple) else time) or 1, rows, columns


def _patches_of(adapter: Adapter, config: Mapping[str, Any], sizes: list[int]) -> Lengths:
    """Counts the patches of a latent with a dimension for each of rows and columns, or of frames too."""
    patches = patch_of(adapter, config)[-len(sizes) :]
    if any(size % patch for size, patch in zip(sizes, patches, strict=True)):
        raise UnsupportedError(
            f"{adapter.model}: latents of {' x '.join(map(str, sizes))} are no whole number of patches of "
            f"{' x '.join(map(str, patches))}"
        )
    counts = [size // patch for size, patch in zip(sizes, patches, strict=True)]
    return (1, counts[0], counts[1]) if len(counts) == 2 else (counts[0], counts[1], counts[2])


def _stated(grid: LatentGrid, named: Mapping[str, Any], known: KnownValues) -> tuple[Lengths, int] | None:
    """Returns what an argument tells; None where it is missing, or tokens come in another order."""
    if grid.sides:
        sides = [named.get(side) for side in grid.sides]
        if None in sides:
            return None
        frames, rows, columns = (int(side) for side in sides if side is not None)
        return (frames, rows, columns), frames * rows * columns
    if grid.shapes is not None:
        if (shapes := named.get(grid.shapes)) is None:
            return None
        own = [shapes[0]] if isinstance(shapes[0][0], int) else shapes[0]
        frames, rows, columns = own[0]
        return (frames, rows, columns), sum(math.prod(shape) for shape in own)
    positions = None if grid.positions is None else named.get(grid.positions)
    if not isinstance(positions, Tensor):
        return None
    total = positions.shape[-2]
    if positions.is_meta:  # with shapes only, the picture is assumed to be the squarest
        side = next(side for side in range(math.isqrt(total), 0, -1) if total % side == 0)
        return (1, side, total // side), total
    lengths = known.of(_rows_and_columns, positions)
    return None if lengths is None else (lengths, total)


def _rows_and_columns(positions: Tensor) -> Lengths | None:
    """Reads rows and columns from the positions of all tokens: frame, row and column; None in another order."""
    places = positions.reshape(-1, *positions.shape[-2:])[0, :, :3]
    places = places[places[:, 0] == places[0, 0]][:, 1:]  # those of other pictures have other first numbers
    first = places.amin(dim=0)
    rows, columns = (int(count) for count in (places.amax(dim=0) - first + 1).tolist())
    if rows * columns != len(places):
        return None
    numbers = torch.arange(len(places), device=places.device)
    expected = torch.stack([numbers // columns, numbers % columns], dim=1)
    return (1, rows, columns) if torch.equal((places - first).long(), expected) else None
