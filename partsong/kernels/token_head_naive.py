"""The token head in plain torch: runs everywhere, and the Triton kernel must agree with it.

Logits exist one tile of rows x tokens at a time; each tile becomes a `TokenState` and the states are merged.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.kernels.arguments import compute_dtype
from partsong.kernels.token_state import FLOOR, TokenState, merge_token_states
from partsong.seeds import philox

__all__ = ["GROUP", "LANES", "STREAM", "Draw", "Logits", "gumbel", "scan"]

#: Fourth counter word of Philox; `partsong.seeds` draws normal and uniform numbers with 0 and 1.
STREAM = 2
#: Tokens that share counters: one counter gives four words, for tokens t, t + LANES, t + 2 LANES and t + 3 LANES.
#: A thread that holds a tensor-core tile owns the same two columns of every eight, so all four words are its own.
LANES = 8
GROUP = 4 * LANES

#: Most logits held at once, and most weights converted at once: megabytes, whatever the model and the batch.
MAX_LOGITS = 1 << 20
MAX_WEIGHTS = 1 << 22
_MAX_TOKENS = 8192

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Logits:
    """How products of hidden states and weights become logits: scale * (softcap * tanh(product / softcap) + bias).

    Attributes:
        bias: `[V]` of any float dtype, or None.
        softcap: positive, or None for none.
        scale: positive.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """How tokens are drawn.

    Attributes:
        keys: int64 `[N]`, the seed of each row (its 64 bits).
        positions: int64 `[N]`, the position of each row in its sequence.
        inverse_temperature: positive and finite.
    """

    keys: Tensor
    positions: Tensor
    inverse_temperature: float


def scan(
    hidden: Tensor, weight: Tensor, logits: Logits, draw: Draw | None = None, *, first_token: int = 0
) -> TokenState:
    """One pass over the vocabulary.

    Args:
        hidden: `[N, C]`.
        weight: `[V, C]`, V and C at least 1, of hidden's dtype and device.
        logits: what happens to the products.
        draw: the noise of the draw; None takes the most likely token.
        first_token: id of the token of weight's first row.

    Returns:
        Fields `[N]`, in float32 (float64 for float64 inputs).
    """
    vocabulary, width = weight.shape
    tokens = min(max(MAX_WEIGHTS // width, 1), _MAX_TOKENS, vocabulary)
    rows = max(MAX_LOGITS // tokens, 1)
    parts = []
    # Autocast would turn the products into bfloat16 ones; meta tensors have no autocast to switch off.
    with nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
        for low in range(0, max(len(hidden), 1), rows):
            here = slice(low, low + rows)
            local = draw and Draw(
                keys=draw.keys[here], positions=draw.positions[here], inverse_temperature=draw.inverse_temperature
            )
            parts.append(_scan_rows(hidden[here], weight, logits, local, first_token, tokens))
    return TokenState.cat(parts)


def gumbel(keys: Tensor, positions: Tensor, first_token: int, num_tokens: int) -> Tensor:
    """Standard Gumbel noise, a pure function of (key, position, token).

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
    # Key words broadcast against the counters as tensors just as numbers would.
    words = philox((counter, low, high, stream), _words(keys))  # pyright: ignore[reportArgumentType]
    bits = torch.stack(words, dim=2).flatten(1)[:, skipped : skipped + num_tokens]
    v = (bits.float() + 0.5) * 2.0**-32
    u = ((_WORD - bits).float() + 0.5) * 2.0**-32
    half = v / (2.0 - v)
    square = half * half
    series = 2.0 * half * (1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0))))
    return -torch.log(torch.where(v < 0.25, series, -torch.log(u)))


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits, `[N, 1, 1]`."""
    x = x.view(-1, 1, 1)
    return x & _WORD, (x >> 32) & _WORD


def _scan_rows(
    hidden: Tensor, weight: Tensor, logits: Logits, draw: Draw | None, first_token: int, tokens: int
) -> TokenState:
    dtype = compute_dtype(hidden.dtype)
    hidden = hidden.to(dtype)
    state: TokenState | None = None
    for low in range(0, len(weight), tokens):
        here = slice(low, low + tokens)
        x = hidden @ weight[here].to(dtype).T
        if logits.softcap is not None:
            x.div_(logits.softcap).tanh_().mul_(logits.softcap)
        if logits.bias is not None:
            x.add_(logits.bias[here].to(dtype))
        part = _tile(x.mul_(logits.scale), draw, first_token + low)
        state = part if state is None else merge_token_states([state, part])
    assert state is not None, "the vocabulary is not empty"
    return state


def _tile(x: Tensor, draw: Draw | None, first_token: int) -> TokenState:
    """The state of one tile of logits `[rows, tokens]`."""
    largest, argmax = x.max(dim=1)
    top = largest.clamp(min=FLOOR)
    if draw is None:
        token, token_logit, score = argmax, top, top
    else:
        noise = gumbel(draw.keys, draw.positions, first_token, x.shape[1])
        score, token = torch.add(noise, x, alpha=draw.inverse_temperature).max(dim=1)
        token_logit = x.gather(1, token.unsqueeze(1)).squeeze(1)
    shifted = x - top.unsqueeze(1)
    weights = torch.exp(shifted)
    return TokenState(
        top=top,
        total=weights.sum(dim=1),
        # The clamp makes -inf * 0, a token that cannot be, the 0 it counts for.
        slope=(weights * shifted.clamp(min=FLOOR)).sum(dim=1),
        argmax=argmax + first_token,
        second=x.scatter(1, argmax.unsqueeze(1), -math.inf).amax(dim=1),
        token=token + first_token,
        token_logit=token_logit,
        score=score,
    )
