"""Draws tokens in such a way that a branch's choice depends only on its own logits, seed and place.

The token at place t is the one with the largest logit / temperature + Gumbel noise. A counter-based generator makes
the noise from (seed, t, token). So the other rows of a batch, their number and their order have no influence. Rounding
differs in the last bits between batches, but that changes the choice only if two candidates are as close as that.
(Inverting the cumulated distribution instead would let every token's rounding move all tokens after it.)

Noise for a whole vocabulary costs more than the step of a small model. Tokens far below the likeliest are therefore
first drawn as one: the largest of several logits with Gumbel noise is distributed as their log-sum-exp with Gumbel
noise (Maddison, Tarlow, Minka, "A* sampling", arXiv 1411.0030, section 2). If that one wins, the same is done among
them. The distribution is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.seeds import philox

__all__ = ["TokenDraw", "draw", "gumbel", "likely_draws"]

#: Tokens this far below the likeliest one, in logit / temperature, are first drawn as one.
_FAR = 8.0
#: How many of the likeliest tokens are searched for a nucleus before all are sorted.
_NEAR = 256
#: Fourth counter words that `partsong.seeds` does not use.
_FIRST, _SECOND = 2, 3
_WORD = 0xFFFFFFFF
#: Stands for all far tokens together; no vocabulary has a token of this number.
_TOGETHER = _WORD
#: What far tokens lie behind near ones where only near ones are drawn; Gumbel noise is hardly ever larger.
_BEHIND = 100.0
#: The least temperature that logits are divided by. There the likeliest token wins, however small its lead.
_COLDEST = 1e-6


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Says how a row draws its next token.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: the share of probability in the nucleus; 1.0 takes in all tokens.
        seed: the row's seed.
        place: the token's place in the answer, from 0.
    """

    temperature: float
    top_p: float
    seed: int
    place: int


def gumbel(seed: Tensor, place: Tensor, token: Tensor, stream: int = _FIRST) -> Tensor:
    """Computes Gumbel noise in float64, as a function of seed, place, token and stream.

    Args:
        seed: int64 `[..., 2]`, the low and the high 32 bits.
        place: int64, the token's place in the answer.
        token: int64 ids.
        stream: picks noise that is unrelated to that of other streams.

    >>> seed = torch.tensor([5, 0])
    >>> bool(gumbel(seed, torch.tensor(0), torch.tensor([3])) == gumbel(seed, torch.tensor(0), torch.tensor([1, 3]))[1])
    True
    """
    zero = torch.zeros_like(token)
    words = philox((token, place, zero, zero + stream), (seed[..., 0], seed[..., 1]))
    # Odd multiples of 2**-53 lie inside 0 < u < 1.
    unit = (((words[0] << 21) | (words[1] >> 11)) | 1).double() * 2.0**-53
    return -torch.log(-torch.log(unit))


def draw(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """Draws a token for each row.

    Args:
        logits: `[rows, vocabulary]`, any floating dtype.
        draws: one per row.

    >>> draw(torch.tensor([[0.0, 5.0]]), [TokenDraw(0.0, 1.0, seed=1, place=0)])
    [1]
    """
    chosen = logits.argmax(dim=-1)
    random = [index for index, each in enumerate(draws) if each.temperature > 0]
    if random:
        rows = torch.tensor(random, device=logits.device)
        chosen[rows] = _draw_random(logits[rows], [draws[index] for index in random])
    return chosen.tolist()


def likely_draws(logits: Tensor, draws: Sequence[TokenDraw], num: int) -> list[list[int]]:
    """Lists for each row the tokens that `draw` would take from logits like these, the likeliest first.

    They are those with the largest noisy logits. A model whose logits are similar draws one of them with the same
    noise, more often than it draws one of the tokens that are likeliest without the noise.

    Args:
        logits: `[rows, vocabulary]`.
        draws: one per row.
        num: how many tokens.

    >>> likely_draws(torch.tensor([[0.0, 5.0, 1.0]]), [TokenDraw(0.0, 1.0, seed=1, place=0)], 2)
    [[1, 2]]
    """
    num = min(num, logits.shape[1])
    best = logits.topk(num, dim=-1).indices
    for row, each in enumerate(draws):
        if each.temperature > 0:
            best[row] = _noisy(logits[row], each).topk(num).indices
    return best.tolist()


def _noisy(logits: Tensor, how: TokenDraw) -> Tensor:
    """Computes a row's noisy logits, in float64."""
    scaled = (logits - logits.max()).double() / max(how.temperature, _COLDEST)
    if how.top_p < 1.0:
        scaled = _nucleus(scaled, how.top_p)
    near = (scaled >= -_FAR).nonzero()[:, 0]
    device = logits.device
    seed = torch.tensor([how.seed & _WORD, how.seed >> 32], device=device)
    noisy = scaled - _BEHIND
    noisy[near] = scaled[near] + gumbel(seed, torch.tensor(how.place, device=device), near)
    return noisy


def _draw_random(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    device = logits.device
    heat = torch.tensor([[max(each.temperature, _COLDEST)] for each in draws], dtype=wide, device=device)
    scaled = logits.to(wide)
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / heat
    for row, each in enumerate(draws):
        if each.top_p < 1.0:
            scaled[row] = _nucleus(scaled[row], each.top_p)
    seeds = torch.tensor([(each.seed & _WORD, each.seed >> 32) for each in draws], device=device)
    places = torch.tensor([each.place for each in draws], device=device)
    near = scaled >= -_FAR
    chosen, best = _largest(scaled, near, seeds, places, _FIRST)
    far = scaled.masked_fill(near, -math.inf)
    together = torch.full_like(places, _TOGETHER)
    others = far.logsumexp(dim=-1).double() + gumbel(seeds, places, together)
    won = (others > best).nonzero()[:, 0]
    if len(won):
        candidates = far[won] > -math.inf
        chosen[won] = _largest(far[won], candidates, seeds[won], places[won], _SECOND)[0]
    return chosen


def _largest(scaled: Tensor, among: Tensor, seeds: Tensor, places: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Finds each row's candidate with the largest noisy logit, and that logit. Every row has a candidate."""
    row, token = among.nonzero(as_tuple=True)
    noisy = scaled[row, token].double() + gumbel(seeds[row], places[row], token, stream)
    best = torch.full(scaled.shape[:1], -math.inf, dtype=torch.float64, device=scaled.device)
    best = best.scatter_reduce(0, row, noisy, "amax")
    winners = noisy == best[row]
    chosen = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    chosen[row[winners]] = token[winners]
    return chosen, best


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Sets a row's logits to -inf outside the smallest set of likeliest tokens that holds `top_p`.

    Tokens exactly as likely as the last one of the set stay as well, so that no order decides between equals.
    Holtzman et al., arXiv 1904.09751.
    """
    whole = scaled.logsumexp(dim=-1)
    top = scaled.topk(min(_NEAR, len(scaled))).values
    if float((top - whole).exp().sum()) < top_p:
        top = scaled.sort(descending=True).values
    mass = (top - whole).exp().cumsum(dim=-1)
    last = int((mass < top_p).sum().clamp(max=len(top) - 1))
    return scaled.masked_fill(scaled < top[last], -math.inf)
