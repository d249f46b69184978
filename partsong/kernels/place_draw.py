"""Draws tokens of places that are decided in any order, each with noise of its own."""

from __future__ import annotations

from torch import Tensor

from partsong.errors import NotANumberError
from partsong.kernels.no_token import marked, why_no_token
from partsong.kernels.token_noise import gumbel

__all__ = ["draw_places"]


def draw_places(
    logits: Tensor, places: Tensor, keys: Tensor, temperature: float, counts: Tensor | None = None
) -> Tensor:
    """Draws a token for each place with that place's own noise, int64 `[B, K]`.

    Args:
        logits: `[B, K, V]`.
        places: int64 `[B, K]`.
        keys: int64 `[B]`, one a row.
        temperature: 0 takes the likeliest.
        counts: bool `[B, K]`, the draws that are used; None uses all.

    Raises:
        NotANumberError: the logits of a place are no numbers, or forbid every token; row and place are named.
    """
    if temperature > 0:
        noise = gumbel(keys[:, None].expand_as(places).reshape(-1), places.reshape(-1), 0, logits.shape[-1])
        logits = logits / temperature + noise.view_as(logits)
    largest, tokens = logits.max(-1)
    tokens = marked(tokens, largest)
    lost = tokens < 0 if counts is None else (tokens < 0) & counts
    for row, place in lost.nonzero()[:1].tolist():
        raise NotANumberError(why_no_token(int(tokens[row, place]), row, int(places[row, place])))
    return tokens
