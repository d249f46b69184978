"""Logits that no token can be drawn from: every way of drawing says so in that row, and draws the others as before."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.kernels.no_token import ALL_FORBIDDEN, NOT_A_NUMBER, why_no_token
from partsong.kernels.token_head import token_ids, token_stats

VOCABULARY = 200
LEAST = torch.finfo(torch.float32).min
#: What stands at token 5, what at all others ("same": what was there), and what comes of it (None: a token).
TABLE = [
    (math.nan, "same", NOT_A_NUMBER),
    (math.inf, "same", NOT_A_NUMBER),
    (math.nan, math.nan, NOT_A_NUMBER),
    (math.inf, -math.inf, NOT_A_NUMBER),
    (math.nan, -math.inf, NOT_A_NUMBER),
    (-math.inf, -math.inf, ALL_FORBIDDEN),
    (LEAST, LEAST, ALL_FORBIDDEN),
    (-math.inf, LEAST, ALL_FORBIDDEN),
    (-math.inf, "same", None),
    (LEAST, "same", None),
    (0.0, -math.inf, None),
    (0.0, LEAST, None),
    (3e4, "same", None),
]


def rows_of(here: float, others: float | str) -> Tensor:
    """Logits of three rows, the middle one odd."""
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    if not isinstance(others, str):
        logits[1] = others
    logits[1, 5] = here
    return logits


def check(drawn: list[int], plain: list[int], expected: int | None) -> None:
    assert drawn[::2] == plain[::2]
    assert drawn[1] >= 0 if expected is None else drawn[1] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("here", "others", "expected"), TABLE)
def test_keyed_draws(here, others, expected, temperature) -> None:
    how = [TokenDraw(temperature, 0.9, seed, 4) for seed in (1, 2, 3)]
    check(draw(rows_of(here, others), how), draw(rows_of(0.0, "same"), how), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("here", "others", "expected"), TABLE)
def test_the_token_head(here, others, expected, temperature) -> None:
    """In plain torch; with the Triton kernel see test_token_head.py."""
    for of in (token_ids, lambda *call, **options: token_stats(*call, **options).token):
        got, want = (
            [_drawn(of, row, seed, temperature) for seed, row in enumerate(x)]
            for x in (rows_of(here, others), rows_of(0.0, "same"))
        )
        check(got, want, expected)


def _drawn(of: Callable[..., Tensor], logits: Tensor, seed: int, temperature: float) -> int:
    """Draws from logits that are the bias of a head of zeros, so that nothing changes them."""
    head = torch.zeros(1, 16), torch.zeros(VOCABULARY, 16)
    return int(of(*head, bias=logits, temperature=temperature, noise=seed))


def test_it_is_named_in_one_line() -> None:
    for token in (NOT_A_NUMBER, ALL_FORBIDDEN):
        line = why_no_token(token, 2, 17)
        assert "position 17 of row 2" in line
        assert "\n" not in line
