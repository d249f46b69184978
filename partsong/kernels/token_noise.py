"""Draws the noise of the token head in plain torch; the Triton kernel draws the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.random_bits import philox

__all__ = ["GROUP", "LANES", "STREAM", "gumbel"]

#: Fourth counter word of Philox; `partsong.seeds` draws normal and uniform numbers with 0 and 1.
STREAM = 2
#: Tokens that share counters: one counter gives four words, for tokens t, t + LANES, t + 2 LANES and t + 3 LANES.
#: A thread that holds a tensor-core tile owns the same two columns of every eight, so all four words are its own.
LANES = 8
GROUP = 4 * LANES

_WORD = 0xFFFFFFFF


def gumbel(keys: Tensor, positions: Tensor, first_token: int, num_tokens: int) -> Tensor:
    """Draws standard Gumbel noise, a function of only (key, position, token).

    -ln E with E exponential: E = -ln(1 - v) for a uniform v of 32 bits. The largest noise decides, and it comes from
    the smallest v, where a float holds all bits of v and the series of ln(1 - v) loses none of them.

    Args:
        keys: int64 `[N]`.
        positions: int64 `[N]`.
        first_token: the first token's id.
        num_tokens: how many tokens.

    Returns:
        float32 `[N, num_tokens]`, between -3.2 and 22.9.

    Source: Philox4x32-10, Salmon et al., SC 2011.
    """
    skipped = first_token % GROUP
    first, last = first_token // GROUP, -(-(first_token + num_tokens) // GROUP)
    device = keys.device
    counter = torch.arange(first * LANES, last * LANES, device=device).view(1, -1, LANES)
    low, high = _words(positions)
    stream = torch.full((), STREAM, device=device)
    words = philox((counter, low, high, stream), _words(keys))
    noise = torch.empty(len(keys), last - first, GROUP // LANES, LANES, device=device)
    for column, word in enumerate(words):
        noise[:, :, column] = _gumbel_of(word)
    return noise.flatten(1)[:, skipped : skipped + num_tokens]


def _gumbel_of(bits: Tensor) -> Tensor:
    """Turns 32 random bits into noise. They are overwritten: memory takes longer than the arithmetic."""
    v = bits.float().add_(0.5).mul_(2.0**-32)
    u = bits.bitwise_xor_(_WORD).float().add_(0.5).mul_(2.0**-32)
    half = 2.0 - v
    torch.div(v, half, out=half)
    square = half * half
    series = (square * (1.0 / 7.0)).add_(1.0 / 5.0).mul_(square).add_(1.0 / 3.0).mul_(square).add_(1.0)
    series.mul_(half.mul_(2.0))
    return torch.where(v < 0.25, series, u.log_().neg_(), out=u).log_().neg_()


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the low and high 32 bits, `[N, 1, 1]`."""
    x = x.view(-1, 1, 1)
    return x & _WORD, (x >> 32) & _WORD
