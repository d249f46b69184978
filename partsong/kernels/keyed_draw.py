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

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.kernels import token_noise
from partsong.kernels.no_token import marked
from partsong.random_bits import philox
from partsong.seeds import derive

__all__ = ["TokenDraw", "draw", "gumbel", "likely_draws", "noisy_logits"]

#: Tokens this far below the likeliest one, in logit / temperature, are first drawn as a group.
_FAR = 8.0
#: How many of the likeliest tokens are searched for a nucleus before all are sorted.
_NEAR = 256
#: Fourth counter words that `partsong.seeds` does not use.
_FIRST, _SECOND = 2, 3
_WORD = 0xFFFFFFFF
#: Stands for all far tokens together; no vocabulary has a token of this number.
_TOGETHER = _WORD
#: Offset of far tokens below near ones where only near ones are drawn; Gumbel noise is hardly ever larger.
_BEHIND = 100.0
#: The lowest temperature that logits are divided by. There the likeliest token wins by any lead.
_COLDEST = 1e-6
#: Up to this many tokens of a few rows, noise is made for all tokens and several places at once and kept for the next
#: places: one call costs as much for a thousand numbers as for one.
_SMALL, _FEW, _PLACES = 512, 64, 16


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Says how a row draws its next token.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: the share of probability in the nucleus; 1.0 takes in all tokens.
        seed: the row's seed.
        place: the token's place in the answer, from 0.
        first: position of the answer's first token in the text, where the token head draws: its noise is a function of
            the position and of a seed for each place (see `TokenNoise`). None for the noise of `draw`.
    """

    temperature: float
    top_p: float
    seed: int
    place: int
    first: int | None = None


def gumbel(seed: Tensor, place: Tensor, token: Tensor, stream: int = _FIRST) -> Tensor:
    """Computes Gumbel noise in float64, as a function of seed, place, token and stream.

    Args:
        seed: int64 `[..., 2]`, the low and the high 32 bits.
        place: int64, the token's place in the answer.
        token: int64 ids.
        stream: selects noise that is unrelated to that of other streams.

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

    Returns:
        A token for each row, or a negative number where there is none to draw; see `no_token`.

    >>> draw(torch.tensor([[0.0, 5.0]]), [TokenDraw(0.0, 1.0, seed=1, place=0)])
    [1]
    """
    largest, chosen = logits.max(dim=-1)
    random = [index for index, each in enumerate(draws) if each.temperature > 0]
    if random:
        rows = torch.tensor(random, device=logits.device)
        chosen[rows] = _draw_random(logits[rows], [draws[index] for index in random])
    return marked(chosen, largest).tolist()


def likely_draws(logits: Tensor, draws: Sequence[TokenDraw], num: int) -> list[list[int]]:
    """Lists for each row the tokens that `draw` would take from similar logits, the likeliest first.

    They are those with the largest noisy logits. A model whose logits are similar draws one of them with the same
    noise, more often than it draws one of the tokens that are likeliest without the noise.

    Args:
        logits: `[rows, vocabulary]`.
        draws: one per row.
        num: how many tokens.

    >>> likely_draws(torch.tensor([[0.0, 5.0, 1.0]]), [TokenDraw(0.0, 1.0, seed=1, place=0)], 2)
    [[1, 2]]
    """
    return noisy_logits(logits, draws).topk(min(num, logits.shape[1]), dim=-1).indices.tolist()


def noisy_logits(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """Computes the sums whose largest is drawn, in float64: logits by temperature, and noise.

    At temperature 0 they are the logits. Tokens that are hardly ever drawn, or lie outside the nucleus, get no noise
    and stand far behind the others.

    Args:
        logits: `[rows, vocabulary]`.
        draws: one per row.
    """
    if not any(how.temperature > 0 for how in draws):
        return logits.double()
    if logits.shape[1] > _SMALL or any(how.first is not None for how in draws):
        return torch.stack([_noisy(row, how) for row, how in zip(logits, draws, strict=True)])
    scaled, noise = _scaled(logits.double(), draws), _kept_noise(draws, logits.shape[1], logits.device)
    noisy = torch.where(scaled >= -_FAR, scaled + noise[:, :-1], scaled - _BEHIND)
    for row, how in enumerate(draws):
        if how.temperature == 0:
            noisy[row] = logits[row]
    return noisy


def _noisy(logits: Tensor, how: TokenDraw) -> Tensor:
    """Computes a row's noisy logits, in float64."""
    if how.temperature == 0:
        return logits.double()
    scaled = _scaled(logits[None].double(), [how])[0]
    if how.first is not None:
        seed = derive(how.seed, "step", how.place)
        key = torch.tensor([seed - (seed >> 63 << 64)], device=logits.device)  # the same 64 bits as int64
        place = torch.tensor([how.first + how.place], device=logits.device)
        return scaled + token_noise.gumbel(key, place, 0, len(logits))[0]
    near, device = (scaled >= -_FAR).nonzero()[:, 0], logits.device
    seed = torch.tensor([how.seed & _WORD, how.seed >> 32], device=device)
    noisy = scaled - _BEHIND
    noisy[near] = scaled[near] + gumbel(seed, torch.tensor(how.place, device=device), near)
    return noisy


def _scaled(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """Divides logits by each row's temperature, its largest at 0, and removes tokens outside a nucleus."""
    heat = [[max(each.temperature, _COLDEST)] for each in draws]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / torch.tensor(heat, dtype=logits.dtype, device=logits.device)
    for row, each in enumerate(draws):
        if each.top_p < 1.0:
            scaled[row] = _nucleus(scaled[row], each.top_p)
    return scaled


def _draw_random(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    device = logits.device
    scaled = _scaled(logits.to(torch.float64 if logits.dtype is torch.float64 else torch.float32), draws)
    near = scaled >= -_FAR
    if logits.shape[1] <= _SMALL and len(draws) <= _FEW:
        noise = _kept_noise(draws, logits.shape[1], device)
        best, chosen = (scaled.double() + noise[:, :-1]).masked_fill_(~near, -math.inf).max(dim=-1)
        apart = noise[:, -1]
    else:
        seeds, places = _keys(draws, device)
        chosen, best = _largest(scaled, near, seeds, places, _FIRST)
        apart = gumbel(seeds, places, torch.full_like(places, _TOGETHER))
    far = scaled.masked_fill(near, -math.inf)
    won = (far.logsumexp(dim=-1).double() + apart > best).nonzero()[:, 0]
    if len(won):
        seeds, places = _keys([draws[index] for index in won.tolist()], device)
        chosen[won] = _largest(far[won], far[won] > -math.inf, seeds, places, _SECOND)[0]
    return chosen


def _keys(draws: Sequence[TokenDraw], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the seeds of rows, as words, and the places of their tokens."""
    seeds = torch.tensor([(each.seed & _WORD, each.seed >> 32) for each in draws], device=device)
    return seeds, torch.tensor([each.place for each in draws], device=device)


def _kept_noise(draws: Sequence[TokenDraw], vocabulary: int, device: torch.device) -> Tensor:
    """Returns the noise of all tokens, followed by that of all far ones together: `[rows, vocabulary + 1]`."""
    rows = [_noise_of(how.seed, how.place // _PLACES, vocabulary, device)[how.place % _PLACES] for how in draws]
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


@functools.lru_cache(maxsize=128)
def _noise_of(seed: int, block: int, vocabulary: int, device: torch.device) -> Tensor:
    """Makes the noise of some places that follow each other, `[places, vocabulary + 1]`."""
    # It may outlive the mode it was made in.
    with torch.inference_mode(False):
        tokens = torch.tensor([*range(vocabulary), _TOGETHER], device=device)
        places = torch.arange(block * _PLACES, (block + 1) * _PLACES, device=device)[:, None]
        words = torch.tensor([seed & _WORD, seed >> 32], device=device)
        return gumbel(words, places.expand(-1, len(tokens)), tokens.expand(_PLACES, -1))


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
