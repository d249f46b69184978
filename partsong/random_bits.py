"""Computes random bits as a function of a key and a counter, and turns them into uniform and normal numbers.

The bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in integer
arithmetic, and become Gaussian through the inverse distribution function AS 241 (Wichura, Applied Statistics 37, 1988)
with a logarithm of our own. Only + - * / sqrt on float64 are used, which IEEE 754 rounds in one way: library logarithms
and cosines differ in the last bit between the vector loop and its remainder, hence between a shard and the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["WORD", "philox", "to_normal", "to_uniform"]

#: The bits of a word.
WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

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
        a = torch.bitwise_right_shift(second, 32, out=left).bitwise_xor_(b).bitwise_xor_(low).bitwise_and_(WORD)
        c = torch.bitwise_right_shift(first, 32, out=right).bitwise_xor_(d).bitwise_xor_(high).bitwise_and_(WORD)
        b, d = second, first
        low, high = (low + _KEY_STEPS[0]) & WORD, (high + _KEY_STEPS[1]) & WORD
    return a, b.bitwise_and_(WORD), c, d.bitwise_and_(WORD)


def to_uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns 53 random bits into a number in 0 <= u < 1."""
    import torch

    # Rounding to a narrow dtype can reach 1.0; the largest number below it is 1 - eps / 2.
    return (bits.double() * 2.0**-53).to(dtype).clamp_(max=1.0 - torch.finfo(dtype).eps / 2)


def to_normal(bits: Tensor) -> Tensor:
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
