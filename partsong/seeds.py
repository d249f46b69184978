"""Draws noise that depends only on the seed and the position: the same image on 1, 2, 3 or 4 ranks.

Element i of the whole tensor is a pure function of (seed, i), so a rank draws its shard without its neighbours and
gets exactly its slice of the whole, in any batch order and for any model dtype. The bits come from Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in integer arithmetic, and become
Gaussian through the inverse distribution function AS 241 (Wichura, Applied Statistics 37, 1988) with a logarithm of
our own. Only + - * / sqrt on float64 are used, which IEEE 754 rounds in one way: library logarithms and cosines
differ in the last bit between the vector loop and its remainder, hence between a shard and the whole.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.knobs import Whole, check_knobs, type_hints

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["check_seed", "derive", "for_images", "generators", "noise", "uniform", "uniform_rows"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: Elements worked on at once: the dozen temporaries of a chunk stay in the cache.
_CHUNK = 1 << 16
#: Fourth counter word of each distribution, so that noise and uniform of one seed are unrelated.
_NORMAL, _UNIFORM = 0, 1

# Coefficients of AS 241 (PPND16): numerators and denominators, lowest power first.
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_MIDDLE = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


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
    return _draw(seed, _NORMAL, _to_normal, shape, start, full_shape, dtype, device)


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

    def finish(bits: Tensor) -> Tensor:
        return _to_uniform(bits, dtype or torch.float32)

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
    keys = torch.tensor([(seed & _WORD, seed >> 32) for seed in checked], dtype=torch.int64).view(-1, 2)
    index = torch.arange(count)
    zero = torch.zeros_like(index)
    parts = []
    for some in keys.split(max(_CHUNK // max(count, 1), 1)):
        words = philox((index, zero, zero, zero + _UNIFORM), (some[:, :1], some[:, 1:]))
        parts.append(_to_uniform((words[0] << 21) | (words[1] >> 11), torch.float32))
    return torch.cat(parts)


def _to_uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns 53 random bits into a number in 0 <= u < 1."""
    import torch

    # Rounding to a narrow dtype can reach 1.0; the largest number below it is 1 - eps / 2.
    return (bits.double() * 2.0**-53).to(dtype).clamp_(max=1.0 - torch.finfo(dtype).eps / 2)


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
        words = philox((index & _WORD, (index >> 32) & _WORD, zero, zero + stream), (seed & _WORD, seed >> 32))
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


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int] | tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes Philox4x32-10: four random 32-bit words per counter.

    Args:
        counter: four int64 tensors of 32-bit words; they broadcast.
        key: two 32-bit words; int64 tensors of them broadcast against the counters.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    import torch

    shape = torch.broadcast_shapes(*(x.shape for x in (*counter, *key) if isinstance(x, torch.Tensor)))
    a, b, c, d = (word.expand(shape) for word in counter)
    # All rounds work in the same memory: fresh pages would take longer than the arithmetic.
    left, right, *rooms = (torch.empty(shape, dtype=torch.int64, device=a.device) for _ in range(6))
    low, high = key
    for turn in range(_ROUNDS):
        # The product wraps around 2**64 in int64, which keeps its bits. Copies of the sign, and the bits of b and
        # d above their words, are dropped at the next multiplication of a and c, and at the end.
        first = torch.mul(a, _MULTIPLIERS[0], out=rooms[turn % 2])
        second = torch.mul(c, _MULTIPLIERS[1], out=rooms[2 + turn % 2])
        a = torch.bitwise_right_shift(second, 32, out=left).bitwise_xor_(b).bitwise_xor_(low).bitwise_and_(_WORD)
        c = torch.bitwise_right_shift(first, 32, out=right).bitwise_xor_(d).bitwise_xor_(high).bitwise_and_(_WORD)
        b, d = second, first
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return a, b.bitwise_and_(_WORD), c, d.bitwise_and_(_WORD)


def _to_normal(bits: Tensor) -> Tensor:
    """Returns the normal quantile of an odd multiple of 2**-53, which lies symmetrically inside 0 < p < 1."""
    import torch

    p = (bits | 1).double() * 2.0**-53
    centred = p - 0.5
    value = centred * _ratio(_CENTRE, 0.180625 - centred * centred)
    tail = (centred.abs() > 0.425).nonzero().squeeze(-1)
    side = centred[tail]
    radius = torch.sqrt(-_log(torch.where(side < 0, p[tail], 1.0 - p[tail])))
    size = torch.where(radius <= 5.0, _ratio(_MIDDLE, radius - 1.6), _ratio(_FAR, radius - 5.0))
    value[tail] = torch.where(side < 0, -size, size)
    return value


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    top, bottom = (_polynomial(row, x) for row in coefficients)
    return top / bottom


def _polynomial(row: tuple[float, ...], x: Tensor) -> Tensor:
    value = x * row[-1] + row[-2]
    for coefficient in row[-3::-1]:
        value = value * x + coefficient
    return value


def _log(x: Tensor) -> Tensor:
    """Computes ln of positive float64, from ln m = 2 artanh((m - 1) / (m + 1)) with m in [0.71, 1.42]."""
    import torch

    mantissa, exponent = torch.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.double() - small.double()
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    # |ratio| <= 0.172, so the first term left out is below 1e-17 of the sum.
    series = _polynomial(tuple(2.0 / (2 * n + 1) for n in range(11)), ratio * ratio)
    return exponent * 0.6931471805599453 + ratio * series
