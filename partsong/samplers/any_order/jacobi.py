"""Decides tokens in a fixed order by guessing a window of them and evaluating all of it until nothing changes.

One forward asks for every token of a window as if the guesses before it were right. The leading tokens that agree
with their guesses are final, and so is the first that does not, since it has seen only correct ones. The answers after
it become the next guesses, at no cost.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partsong.kernels.place_draw import draw_places
from partsong.knobs import Count, Number, check_knobs, type_hints
from partsong.samplers.any_order.groups import row_keys
from partsong.samplers.text.any_order import AnyOrderModel, AnyOrderText

__all__ = ["decode_jacobi"]


@torch.no_grad()
def decode_jacobi(
    model: AnyOrderModel,
    order: Tensor,
    *,
    window: Count = 16,
    temperature: Annotated[float, Number(0.0)] = 1.0,
    seed: int = 0,
) -> AnyOrderText:
    """Decides the tokens of texts in a given order; one forward decides all leading tokens that were guessed right.

    Exact: the texts are those of ``window=1``, one token a forward, token for token. The noise is a function of (seed,
    row, position), so a token is drawn the same way in every forward.

    Args:
        model: trained for any order, or at least for this one.
        order: int64 `[B, L]`, the positions of each row in the order in which they are decided.
        window: how many tokens to ask for at once.
        temperature: of the draws; 0 takes the likeliest tokens.
        seed: of the noise.

    Raises:
        ArgumentError: a number out of range.

    Source: Jacobi decoding, arXiv 2002.03629; with constant noise it works at any temperature. Speculative
    Jacobi decoding, arXiv 2410.01699, accepts by a ratio of probabilities instead.

    >>> even = lambda tokens, rank, places, seen: torch.zeros(*places.shape, 3)
    >>> decode_jacobi(even, torch.tensor([[2, 0, 3, 1]]), temperature=0).forwards.tolist()
    [1]
    """
    numbers = {"window": window, "temperature": temperature}
    check_knobs(type_hints(decode_jacobi), numbers, owner="decode_jacobi: ")
    length, rank, keys = order.shape[1], order.argsort(1), row_keys(seed, order)
    tokens, at = torch.zeros_like(order), torch.zeros_like(order[:, 0])
    reach = torch.zeros_like(at)  # positions with guesses
    forwards, drafted, rejected = (torch.zeros_like(at) for _ in range(3))
    step = torch.arange(window, device=order.device)
    while (at < length).any():
        ranks = at[:, None] + step
        inside = ranks < length
        places = order.gather(1, ranks.clamp(max=length - 1))
        # Where there is no guess yet, the last known token serves as one.
        last = tokens.gather(1, order.gather(1, (reach[:, None] - 1).clamp(min=0)))
        guesses = torch.where(ranks < reach[:, None], tokens.gather(1, places), last)
        _write(tokens, places, guesses, inside)
        logits = model(tokens, rank, places, ranks.clamp(max=length))
        drawn = draw_places(logits, places, keys, temperature, inside & (at < length)[:, None])
        _write(tokens, places, drawn, inside)
        is_guess = (ranks < length - 1) & (step < window - 1)
        right = (is_guess & (drawn == guesses)).long().cumprod(1).sum(1)
        busy = (at < length).long()
        forwards += busy
        drafted += is_guess.sum(1)
        rejected += is_guess.sum(1) - right
        reach = torch.minimum(at + window, torch.full_like(at, length))
        at = torch.minimum(at + (right + 1) * busy, torch.full_like(at, length))
    return AnyOrderText(tokens=tokens, forwards=forwards, drafted=drafted, rejected=rejected)


def _write(tokens: Tensor, places: Tensor, values: Tensor, mask: Tensor) -> None:
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(places)
    tokens[rows[mask], places[mask]] = values[mask]
