"""Computes the token head in plain torch: it runs everywhere, and the Triton kernel must agree with it.

Logits exist one tile of rows x tokens at a time; each tile becomes a `TokenState` and the states are merged. On a CPU
the tile is what makes it fast: it is small enough that everything after the product happens in the cache.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partsong.kernels.arguments import compute_dtype
from partsong.kernels.few_rows import few_rows_product
from partsong.kernels.no_token import FLOOR, marked
from partsong.kernels.token_noise import gumbel
from partsong.kernels.token_state import TokenState, merge_token_states

__all__ = ["Draw", "Logits", "draw_tokens", "scan", "to_logits"]

#: Most logits held at once, and most weights converted at once: megabytes for any model and batch.
MAX_LOGITS = 1 << 19
MAX_WEIGHTS = 1 << 22
#: Most rows of a tile: more would not make the product faster.
MAX_ROWS = 128
#: Rows that count as few: the product then takes as long as reading the weights.
FEW_ROWS = 8
#: Tokens of one product: for few rows it is memory that counts, and panels of this size stay in a CPU's cache.
PANEL = 512
#: Neighbouring logits whose maximum is taken first: finding it in one block is cheaper than carrying indices along.
BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Logits:
    """Turns products of hidden states and weights into logits: scale * (softcap * tanh(product / softcap) + bias).

    Attributes:
        bias: `[V]` of any float dtype, or None.
        softcap: positive, or None.
        scale: positive.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """Says how tokens are drawn.

    Attributes:
        keys: int64 `[N]`, the seed of each row (its 64 bits).
        positions: int64 `[N]`, the position of each row in its sequence.
        inverse_temperature: positive and finite.
    """

    keys: Tensor
    positions: Tensor
    inverse_temperature: float

    def rows(self, here: slice) -> Draw:
        """Returns the draw of some of the rows."""
        return replace(self, keys=self.keys[here], positions=self.positions[here])


def scan(
    hidden: Tensor, weight: Tensor, logits: Logits, draw: Draw | None = None, *, first_token: int = 0
) -> TokenState:
    """Goes once over the vocabulary.

    Args:
        hidden: `[N, C]`.
        weight: `[V, C]`, V and C at least 1, of hidden's dtype and device.
        logits: what happens to the products.
        draw: the noise of the draw; None takes the most likely token.
        first_token: id of the token of weight's first row.

    Returns:
        Fields `[N]`, in float32 (float64 for float64 inputs).
    """
    dtype = compute_dtype(hidden.dtype)
    num_rows, num_tokens = _tile_shape(len(hidden), *weight.shape, converted=weight.dtype is not dtype)
    slabs = [slice(low, low + num_rows) for low in range(0, max(len(hidden), 1), num_rows)]
    states: list[list[TokenState]] = [[] for _ in slabs]
    # Autocast would turn the products into bfloat16 ones; meta tensors have no autocast to switch off.
    with nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
        for low in range(0, len(weight), num_tokens):
            here = slice(low, low + num_tokens)
            part = weight[here].to(dtype)
            for slab, done in zip(slabs, states, strict=True):
                x = to_logits(_products(hidden[slab].to(dtype), part), logits, here)
                done.append(_tile(x, draw and draw.rows(slab), first_token + low))
        return TokenState.cat([merge_token_states(done) for done in states])


def draw_tokens(hidden: Tensor, weight: Tensor, logits: Logits, draw: Draw | None = None) -> Tensor:
    """Goes once over the vocabulary only for the drawn tokens, int64 `[N]`; arguments as in `scan`.

    Where there is none to draw it is a negative number; see `no_token`.
    """
    dtype = compute_dtype(hidden.dtype)
    num_rows, num_tokens = _tile_shape(len(hidden), *weight.shape, converted=weight.dtype is not dtype)
    drawn: list[Tensor] = []
    with nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, max(len(hidden), 1), num_rows):
            slab = slice(first, first + num_rows)
            rows, own = hidden[slab].to(dtype), draw and draw.rows(slab)
            best, token = _best(rows, weight[:num_tokens].to(dtype), logits, own, 0)
            for low in range(num_tokens, len(weight), num_tokens):
                score, other = _best(rows, weight[low : low + num_tokens].to(dtype), logits, own, low)
                # The first of equals stays, and so does a NaN, as in a maximum over everything.
                wins = (score > best) | (score.isnan() & ~best.isnan())
                best, token = torch.where(wins, score, best), torch.where(wins, other, token)
            drawn.append(marked(token, best))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _best(rows: Tensor, part: Tensor, logits: Logits, draw: Draw | None, low: int) -> tuple[Tensor, Tensor]:
    """Returns what wins among the tokens from `low` on, and its token."""
    x = to_logits(_products(rows, part), logits, slice(low, low + len(part)))
    if draw is not None:
        noise = gumbel(draw.keys, draw.positions, low, len(part)).to(x.dtype)
        x = noise.add_(x, alpha=draw.inverse_temperature)
    score, token = _largest(x)
    return score, token + low


def _tile_shape(num_rows: int, vocabulary: int, width: int, converted: bool) -> tuple[int, int]:
    """Returns the rows and tokens of a tile."""
    rows = max(min(num_rows, MAX_ROWS), 1)
    tokens = MAX_LOGITS // rows
    if converted:
        tokens = min(tokens, MAX_WEIGHTS // width)
    return rows, min(max(tokens, 1), vocabulary)


def _products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Computes hidden @ weight.T, a panel of tokens at a time."""
    if len(hidden) <= FEW_ROWS:
        return few_rows_product(hidden, weight)
    x = hidden.new_empty(len(hidden), len(weight))
    for low in range(0, len(weight), PANEL):
        here = slice(low, low + PANEL)
        torch.mm(hidden, weight[here].T, out=x[:, here])
    return x


def to_logits(x: Tensor, logits: Logits, here: slice | Tensor) -> Tensor:
    """Turns the products x of hidden states with the tokens `here` into logits, in place."""
    if logits.softcap is not None:
        x.div_(logits.softcap).tanh_().mul_(logits.softcap)
    if logits.bias is not None:
        x.add_(logits.bias[here].to(x.dtype))
    return x if logits.scale == 1.0 else x.mul_(logits.scale)


def _tile(x: Tensor, draw: Draw | None, first_token: int) -> TokenState:
    """Computes the state of one tile of logits `[rows, tokens]`, which are overwritten."""
    largest, argmax = _largest(x)
    top = largest.clamp(min=FLOOR)
    token, token_logit, score = argmax, top, top
    if draw is not None:
        noise = gumbel(draw.keys, draw.positions, first_token, x.shape[1]).to(x.dtype)
        score, token = _largest(noise.add_(x, alpha=draw.inverse_temperature))
        token_logit = x.gather(1, token.unsqueeze(1)).squeeze(1)
    # The largest is taken out to find the second. Its own weight is put back, and it adds nothing to the slope.
    second = x.scatter_(1, argmax.unsqueeze(1), -math.inf).amax(dim=1)
    # The clamp makes -inf * 0, a token that cannot be, the 0 it counts for.
    shifted = x.sub_(top.unsqueeze(1)).clamp_(min=FLOOR)
    weights = torch.exp(shifted)
    total = weights.sum(dim=1).add_(torch.exp(largest - top))
    return TokenState(
        top=top,
        total=total,
        slope=weights.mul_(shifted).sum(dim=1),
        argmax=argmax + first_token,
        second=second,
        token=token + first_token,
        token_logit=token_logit,
        score=score,
    )


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest entry of each row and its column, the first among equals: `x.max(dim=1)`."""
    if x.shape[1] % BLOCK:
        return x.max(dim=1)
    blocks = x.unflatten(1, (-1, BLOCK))
    top, block = blocks.amax(dim=2).max(dim=1)
    inside = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, BLOCK)).squeeze(1)
    return top, block * BLOCK + inside.max(dim=1).indices
