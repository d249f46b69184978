"""Draws noise that depends only on the seed and the position: the same image on 1, 2, 3 or 4 ranks.

Element i of the whole tensor is a pure function of (seed, i), so a rank draws its shard without its neighbours and
gets exactly its slice of the whole, in any batch order and for any model dtype; `partsong.random_bits` says how.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.random_bits import WORD, philox, to_normal, to_uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["check_seed", "derive", "for_images", "generators", "noise", "uniform", "uniform_rows"]

#: Elements worked on at once: the dozen temporaries of a chunk stay in the cache.
_CHUNK = 1 << 16
#: Fourth counter word of each distribution, so that noise and uniform of one seed are unrelated.
_NORMAL, _UNIFORM = 0, 1


def check_seed(seed: int) -> int:
    """Returns `seed` as an int.

    Raises:
        ArgumentTypeError: it is not an integer (bools are not).
        ArgumentError: it is not within 0 <= seed < 2**64.
    """
    try:
        value = operator.index(seed)
    except TypeError:
        value = None
    if value is None or isinstance(seed, bool):
        raise ArgumentTypeError(f"a seed is an int, found {seed!r} ({type(seed).__name__})")
    if not 0 <= value < 1 << 64:
        raise ArgumentError(f"a seed lies in 0 <= seed < 2**64, found {value}")
    return value


def derive(seed: int, *labels: str | int) -> int:
    """Derives a seed for a purpose: stable across machines and versions, unrelated for other labels.

    Args:
        seed: the seed to start from.
        *labels: what the new seed is for, as text and integers; ``derive(s, 1)`` and ``derive(s, "1")`` differ.

    Returns:
        An integer in 0 <= seed < 2**64.
    """
    text = str(check_seed(seed))
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ArgumentTypeError(f"a label of derive is text or an int, found {label!r}")
        # repr quotes text, so different lists of labels never look the same.
        text += f"/{label!r}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def for_images(seed: int, num: Annotated[int, Whole(0)], *, first: Annotated[int, Whole(0)] = 0) -> list[int]:
    """Returns the seeds of samples first, first + 1, ... of a run: sample i has the same seed in any batch.

    Args:
        seed: the run's seed.
        num: how many.
        first: index of the first, so a rank with samples 4 and 5 asks for ``for_images(seed, 2, first=4)``.
    """
    check_seed(seed)
    check_knobs(type_hints(for_images), {"num": num, "first": first}, owner="for_images: ")
    return [derive(seed, "image", index) for index in range(first, first + num)]


def generators(seed: int, num: int, device: str | torch.device = "cpu", *, first: int = 0) -> list[torch.Generator]:
    """Returns one generator per image for a pipeline's ``generator=``: image i is the same in any batch.

    Their seeds are those of `for_images`. They draw on `device`: "cpu" gives the same noise for a model on any device.
    """
    import torch

    return [torch.Generator(device).manual_seed(image) for image in for_images(seed, num, first=first)]


def noise(
    seed: int,
    shape: Sequence[int],
    *,
    start: Sequence[int] | None = None,
    full_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Tensor:
    """Draws standard normal noise, or any box of it.

    Args:
        seed: 0 <= seed < 2**64.
        shape: shape of the result.
        start: where the result begins inside `full_shape`, one offset per dim; default zeros.
        full_shape: shape of the tensor the result is a box of; default `shape`. Equal full shapes give equal values
            at equal positions.
        dtype: floating dtype of the result, default float32; values are computed in float64 and rounded once.
        device: device of the result; the values do not depend on it (they are computed on the CPU).

    Raises:
        ArgumentError: a seed, shape or box is impossible.
        ArgumentTypeError: a seed is not an integer, or the dtype is not floating.
    """
    return _draw(seed, _NORMAL, to_normal, shape, start, full_shape, dtype, device)


def uniform(
    seed: int,
    shape: Sequence[int],
    *,
    start: Sequence[int] | None = None,
    full_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Tensor:
    """Draws numbers in 0 <= u < 1, unrelated to `noise` of the same seed; arguments and errors as there."""
    import torch

    finish = partial(to_uniform, dtype=dtype or torch.float32)
    return _draw(seed, _UNIFORM, finish, shape, start, full_shape, dtype, device)


def uniform_rows(seeds: Sequence[int], count: int) -> Tensor:
    """Draws what `uniform` draws for each of many seeds at once, ``[len(seeds), count]`` in float32.

    >>> import torch
    >>> torch.equal(uniform_rows([3, 4], 5)[1], uniform(4, (5,)))
    True
    """
    import torch

    checked = [check_seed(seed) for seed in seeds]
    # A word of a seed has 32 bits, so both fit into int64.
    keys = torch.tensor([(seed & WORD, seed >> 32) for seed in checked], dtype=torch.int64).view(-1, 2)
    index = torch.arange(count)
    zero = torch.zeros_like(index)
    parts = []
    for some in keys.split(max(_CHUNK // max(count, 1), 1)):
        words = philox((index, zero, zero, zero + _UNIFORM), (some[:, :1], some[:, 1:]))
        parts.append(to_uniform((words[0] << 21) | (words[1] >> 11), torch.float32))
    return torch.cat(parts)


def _draw(
    seed: int,
    stream: int,
    finish: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    start: Sequence[int] | None,
    full_shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> Tensor:
    import torch

    seed = check_seed(seed)
    size, begin, full = _check_box(shape, start, full_shape)
    dtype = dtype or torch.float32
    if not dtype.is_floating_point:
        raise ArgumentTypeError(f"noise has a floating dtype, found {dtype}")
    result = torch.empty(size, dtype=dtype)
    flat = result.view(-1)
    positions = _positions(size, begin, full)
    for low in range(0, flat.numel(), _CHUNK):
        index = positions[low : low + _CHUNK]
        zero = torch.zeros_like(index)
        words = philox((index & WORD, (index >> 32) & WORD, zero, zero + stream), (seed & WORD, seed >> 32))
        # 53 bits of the first two words: as many as a float64 between 0.5 and 1 can distinguish.
        flat[low : low + _CHUNK] = finish((words[0] << 21) | (words[1] >> 11))
    return result if device is None else result.to(device)


def _check_box(
    shape: Sequence[int], start: Sequence[int] | None, full_shape: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    try:
        size = tuple(operator.index(n) for n in shape)
        full = size if full_shape is None else tuple(operator.index(n) for n in full_shape)
        begin = (0,) * len(size) if start is None else tuple(operator.index(n) for n in start)
    except TypeError as error:
        raise ArgumentTypeError(
            f"shape, start and full_shape are sequences of ints; found {shape!r}, {start!r}, {full_shape!r}"
        ) from error
    fits = len(size) == len(full) == len(begin) and all(
        min(offset, count) >= 0 and offset + count <= whole
        for offset, count, whole in zip(begin, size, full, strict=True)
    )
    if not fits:
        raise ArgumentError(f"a box of shape {size} at {begin} does not lie inside {full}")
    if math.prod(full) >= 1 << 63:
        raise ArgumentError(f"noise numbers fewer than 2**63 positions, {full} has more")
    return size, begin, full


def _positions(size: tuple[int, ...], begin: tuple[int, ...], full: tuple[int, ...]) -> Tensor:
    """Returns the row-major index inside `full` of every element of the box, flat."""
    import torch

    index = torch.zeros((1,) * len(size), dtype=torch.int64)
    step = 1
    for dim in reversed(range(len(size))):
        line = torch.arange(begin[dim], begin[dim] + size[dim]) * step
        index = index + line.view((-1,) + (1,) * (len(size) - 1 - dim))
        step *= full[dim]
    return index.reshape(-1)
