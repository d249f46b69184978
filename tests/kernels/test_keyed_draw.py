"""Drawing tokens: the distribution, and that a draw depends on its own row, seed and place alone."""

from __future__ import annotations

import math

import pytest
import torch

from partsong.kernels.keyed_draw import TokenDraw, draw, gumbel


def draws(num: int, temperature: float = 1.0, top_p: float = 1.0) -> list[TokenDraw]:
    return [TokenDraw(temperature, top_p, seed=1000 + index, place=index % 7) for index in range(num)]


def frequencies(logits: torch.Tensor, num: int, **more: float) -> torch.Tensor:
    tokens = draw(logits.expand(num, -1), draws(num, **more))
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / num


def test_the_noise_is_gumbel_noise() -> None:
    found = gumbel(torch.tensor([7, 9]), torch.tensor(3), torch.arange(20000)).sort().values
    expected = torch.exp(-torch.exp(-found))
    distance = (expected - (torch.arange(20000) + 0.5) / 20000).abs().max()
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded once in a hundred times.
    assert distance < 1.63 / math.sqrt(20000)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    expected = (logits / temperature).softmax(-1)
    found = frequencies(logits, 20000, temperature=temperature)
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / 20000)


def test_tokens_far_below_the_likeliest_are_drawn_as_often_as_they_should() -> None:
    """They are drawn together first: their share, and the shares within it, have to be right."""
    logits = torch.cat([torch.tensor([8.2]), torch.zeros(80), torch.full((80,), math.log(3.0))])
    expected = logits.double().softmax(-1)
    found = frequencies(logits, 12000)
    rest, heavy = 1 - expected[0], expected[81:].sum()
    assert rest > 0.05
    assert abs(found[1:].sum() - rest) < 4 * math.sqrt(rest * (1 - rest) / 12000)
    assert abs(found[81:].sum() - heavy) < 4 * math.sqrt(heavy * (1 - heavy) / 12000)
    assert len(found[1:].nonzero()) > 130


def test_a_draw_is_a_function_of_its_row_alone() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 200)
    every = [TokenDraw(0.7 + index % 3 * 0.3, [1.0, 0.8][index % 2], index, index % 5) for index in range(40)]
    together = draw(logits, every)
    order = torch.randperm(40).tolist()
    assert [together[index] for index in order] == draw(logits[order], [every[index] for index in order])
    assert together == [draw(logits[index : index + 1], [every[index]])[0] for index in range(40)]
    assert together != draw(
        logits, [TokenDraw(each.temperature, each.top_p, each.seed, each.place + 1) for each in every]
    )
    assert together != draw(
        logits, [TokenDraw(each.temperature, each.top_p, each.seed + 1, each.place) for each in every]
    )


def test_rounding_of_logits_hardly_ever_changes_a_draw() -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(1, 5000)
    many = draws(400)
    shaken = logits + 1e-6 * torch.randn(1, 5000)
    assert draw(logits.expand(400, -1), many) == draw(shaken.expand(400, -1), many)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_the_nucleus_is_the_smallest_set_of_likeliest_tokens_that_holds_top_p(top_p: float) -> None:
    torch.manual_seed(2)
    logits = 2 * torch.randn(12)
    chances = logits.softmax(-1)
    order = sorted(range(12), key=lambda token: -chances[token])
    size = next(n for n in range(1, 13) if chances[order[:n]].sum() >= top_p or n == 12)
    found = frequencies(logits, 4000, top_p=top_p)
    expected = torch.zeros(12)
    expected[order[:size]] = chances[order[:size]] / chances[order[:size]].sum()
    assert set(found.nonzero()[:, 0].tolist()) <= set(order[:size])
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / 4000)


def test_a_nucleus_of_many_tokens_is_found_too() -> None:
    """More tokens than are looked at first."""
    logits = torch.cat([torch.full((600,), 1.0), torch.zeros(600)])
    found = frequencies(logits, 1500, top_p=0.7)
    assert found[600:].sum() == 0 and len(found.nonzero()) > 500


def test_temperature_zero_takes_the_likeliest_and_a_tiny_one_does_not_overflow() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 50)
    best = logits.argmax(-1).tolist()
    assert draw(logits, draws(6, temperature=0.0)) == best
    assert draw(logits, draws(6, temperature=1e-300)) == best
    assert draw(logits.bfloat16(), draws(6, temperature=0.0)) == logits.bfloat16().argmax(-1).tolist()


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    assert set(draw(logits.expand(200, -1), draws(200))) == {0, 2}
