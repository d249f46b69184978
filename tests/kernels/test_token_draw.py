"""Drawn tokens: the noise knows only seed, position and token, and the draws follow the softmax. Any shape works."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from partsong.kernels import token_head_naive
from partsong.kernels.token_head import TokenNoise, token_stats
from partsong.kernels.token_head_naive import Draw, Logits
from partsong.kernels.token_noise import GROUP, gumbel
from partsong.random_bits import philox
from tests import covering
from tests.kernels.token_oracle import check, forced, inputs, logits_of, needs_triton, on_each_twin, on_triton


@pytest.fixture
def twin(request) -> Iterator[str]:
    with forced(request.param) as name:
        yield name


def reference_noise(key: int, position: int, token: int) -> float:
    """Gumbel noise of one token in float64, one counter at a time."""
    counter = token // GROUP * 8 + token % 8
    words = philox(
        tuple(torch.tensor([word]) for word in (counter, position & 0xFFFFFFFF, position >> 32, 2)),
        (key & 0xFFFFFFFF, key >> 32),
    )
    return -math.log(-math.log1p(-(int(words[token % GROUP // 8]) + 0.5) / 2**32))


def test_noise_is_the_documented_function() -> None:
    for key, position, first in ((0, 0, 0), (2**64 - 3, 2**40 + 5, 126_431), (7, 12, 31)):
        signed = key - (1 << 64) if key >> 63 else key
        drawn = gumbel(torch.tensor([signed]), torch.tensor([position]), first, 70)[0]
        expected = [reference_noise(key, position, token) for token in range(first, first + 70)]
        assert drawn.tolist() == pytest.approx(expected, abs=1e-5, rel=1e-6)


def test_noise_is_gumbel() -> None:
    drawn = gumbel(torch.arange(50), torch.arange(50), 5, 4001).double()
    assert drawn.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert drawn.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    assert (drawn < 2.0).double().mean().item() == pytest.approx(math.exp(-math.exp(-2.0)), abs=0.003)


@on_triton
def test_the_kernel_draws_the_same_noise(twin) -> None:
    # A vocabulary of one: the score of the draw is the noise itself.
    from partsong.kernels.token_head_launch import scan

    keys = torch.tensor([0, -1, 2**62 + 5, -(2**63)]).repeat_interleave(4)
    positions = torch.tensor([0, 1, 2**31, 2**40 + 3]).repeat(4)
    draw = Draw(keys=keys, positions=positions, inverse_temperature=1.0)
    for token in (*range(0, 34, 3), 126_463):
        state = scan(torch.zeros(16, 8), torch.zeros(1, 8), Logits(), draw, first_token=token)
        assert torch.allclose(state.score, gumbel(keys, positions, token, 1)[:, 0], rtol=3e-6, atol=3e-6)
        assert (state.token == token).all()


@on_each_twin
def test_draws_do_not_know_their_neighbours(twin) -> None:
    hidden, weight = inputs((4, 6), 170, 20)
    seed = [11, 12, 13, 14]
    whole = token_stats(hidden, weight, temperature=1.3, noise=TokenNoise(seed=seed))
    order = [2, 0, 3, 1]
    drawn = token_stats(hidden[order], weight, temperature=1.3, noise=TokenNoise(seed=[seed[i] for i in order]))
    assert torch.equal(drawn.token, whole.token[order])
    window = TokenNoise(seed=13, positions=torch.arange(2, 5).view(1, 3))
    drawn = token_stats(hidden[2:3, 2:5], weight, temperature=1.3, noise=window)
    assert torch.equal(drawn.token, whole.token[2:3, 2:5])
    flat = TokenNoise(seed=[seed[i // 6] for i in range(24)], positions=torch.arange(24) % 6)
    drawn = token_stats(hidden.flatten(0, 1), weight, temperature=1.3, noise=flat)
    assert torch.equal(drawn.token, whole.token.flatten())


@on_each_twin
def test_positions_may_have_strides(twin) -> None:
    hidden, weight = inputs(6, 200, 20)
    places = torch.arange(12)[::2]
    drawn = token_stats(hidden, weight, temperature=1.3, noise=TokenNoise(seed=3, positions=places))
    expected = token_stats(hidden, weight, temperature=1.3, noise=TokenNoise(seed=3, positions=places.clone()))
    assert not torch.equal(token_stats(hidden, weight, temperature=1.3, noise=3).token, expected.token)
    assert torch.equal(drawn.token, expected.token)


def test_draws_do_not_know_the_tiles(monkeypatch) -> None:
    hidden, weight = inputs(12, 170, 20)
    whole = token_stats(hidden, weight, temperature=1.3, noise=8)
    for max_logits, max_weights, max_rows in ((64, 20 * 7, 128), (1, 20 * 64, 10), (500, 1, 7)):
        monkeypatch.setattr(token_head_naive, "MAX_LOGITS", max_logits)
        monkeypatch.setattr(token_head_naive, "MAX_WEIGHTS", max_weights)
        monkeypatch.setattr(token_head_naive, "MAX_ROWS", max_rows)
        assert torch.equal(token_stats(hidden, weight, temperature=1.3, noise=8).token, whole.token)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_have_the_dtype_of_the_logits(dtype) -> None:
    hidden, weight = inputs(5, 128, 20, dtype)
    draw = Draw(keys=torch.full((5,), 8), positions=torch.arange(5), inverse_temperature=0.7)
    state = token_head_naive.scan(hidden, weight, Logits(), draw)
    scores = 0.7 * logits_of(hidden, weight) + gumbel(draw.keys, draw.positions, 0, 128).double()
    assert state.score.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.equal(state.token, scores.argmax(dim=1))
    assert (state.score - scores.amax(dim=1)).abs().max() <= (1e-12 if dtype is torch.float64 else 1e-5)


@on_triton
def test_both_twins_draw_the_same_tokens(twin) -> None:
    from partsong.kernels.token_head_launch import scan
    from partsong.kernels.token_head_tiles import Tiles

    hidden, weight = inputs(20, 205, 20)
    draw = Draw(keys=torch.full((20,), 8), positions=torch.arange(20), inverse_temperature=1 / 1.3)
    for first_token in (0, 45):
        whole = token_head_naive.scan(hidden, weight, Logits(), draw, first_token=first_token)
        for rows, tokens, noise, programs in ((16, 64, 64, 1), (32, 128, 32, 8)):
            tiles = Tiles(rows=rows, tokens=tokens, width=32, noise=noise, num_warps=4, num_stages=2)
            drawn = scan(hidden, weight, Logits(), draw, first_token=first_token, tiles=tiles, programs=programs)
            assert torch.equal(drawn.token, whole.token)
            assert torch.allclose(drawn.score, whole.score, rtol=1e-5)


@on_triton
@pytest.mark.parametrize("first_token", [pytest.param(0, marks=pytest.mark.full), 45])
def test_ties_within_a_split_take_the_lowest_token(twin, first_token) -> None:
    from partsong.kernels.token_head_launch import scan
    from partsong.kernels.token_head_tiles import Tiles

    # At 64 / 1e-6 a float32 counts in steps of 4: most of the noise is rounded away, and many tokens share the best.
    hidden, weight, bias = torch.zeros(12, 8), torch.zeros(200, 8), torch.full((200,), 64.0)
    draw = Draw(keys=torch.full((12,), 8), positions=torch.arange(12), inverse_temperature=1e6)
    scores = gumbel(draw.keys, draw.positions, first_token, 200) + 64e6
    expected = scores.max(dim=1).indices + first_token
    assert ((scores == scores.amax(dim=1, keepdim=True)).sum(dim=1) > 1).any()
    for tokens, noise, programs in ((32, 32, 1), (128, 32, 1), (128, 128, 2)):
        tiles = Tiles(rows=16, tokens=tokens, width=16, noise=noise, num_warps=4, num_stages=2)
        options = {"first_token": first_token, "tiles": tiles, "programs": programs}
        drawn = scan(hidden, weight, Logits(bias=bias), draw, **options)
        assert torch.equal(drawn.token, expected)
        assert (drawn.argmax == first_token).all()
        assert (drawn.second == drawn.top).all()
        drawn = scan(hidden, weight, Logits(bias=bias - math.inf), draw, **options)
        assert (drawn.token == first_token).all()
        assert (drawn.argmax == first_token).all()


@on_each_twin
def test_other_seeds_and_positions_draw_otherwise(twin) -> None:
    hidden, weight = torch.zeros(30, 8), torch.zeros(200, 8)

    def draw(noise) -> Tensor:
        return token_stats(hidden, weight, temperature=1.0, noise=noise).token

    assert torch.equal(draw(5), draw(TokenNoise(seed=5)))
    shifted = draw(TokenNoise(seed=5, positions=torch.arange(1, 31)))
    assert torch.equal(shifted[:-1], draw(5)[1:])
    assert (draw(5) == draw(6)).sum() < 5
    assert (draw(5) == shifted).sum() < 5
    assert draw(5).unique().numel() > 20


def test_argmax_and_statistics_do_not_know_the_draw() -> None:
    hidden, weight = inputs(9, 120, 16)
    cold, hot = token_stats(hidden, weight), token_stats(hidden, weight, temperature=5.0, noise=0)
    assert not torch.equal(cold.token, hot.token)
    for name in ("argmax", "max_prob", "margin", "entropy", "lse"):
        assert torch.equal(getattr(cold, name), getattr(hot, name))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature) -> None:
    # 40 000 positions of one row: the total variation of a sample that large is about 0.005.
    x = torch.tensor([1.0, 0.2, -1.0, 2.0, -math.inf, 0.0, 1.9])
    hidden = torch.zeros(1, 40_000, 3)
    drawn = token_stats(hidden, torch.zeros(7, 3), bias=x, temperature=temperature, noise=9).token
    counts = torch.bincount(drawn.flatten(), minlength=7).double() / drawn.numel()
    distance = (counts - torch.softmax(x.double() / temperature, 0)).abs().sum() / 2
    assert distance < 0.012
    assert counts[4] == 0


def test_neighbouring_tokens_and_positions_are_independent() -> None:
    # Pairs of draws over the four words of a counter: a shared or shifted word would show here.
    # With 1024 kinds of pairs a fair sample of 40 000 lies about 0.064 from uniform.
    drawn = token_stats(torch.zeros(1, 40_000, 1), torch.zeros(GROUP, 1), temperature=1.0, noise=2).token.flatten()
    pairs = torch.bincount(drawn[:-1] * GROUP + drawn[1:], minlength=GROUP**2).double() / (drawn.numel() - 1)
    assert (pairs - 1 / GROUP**2).abs().sum() / 2 < 0.07


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    rows: int
    vocabulary: int
    width: int
    first_token: int
    scale: float
    temperature: float
    forbidden: float
    duplicates: bool
    seed: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = inputs(self.rows, self.vocabulary, self.width, seed=self.seed % 2**31)
        if self.duplicates:
            half = self.vocabulary // 2
            weight[half:] = weight[: self.vocabulary - half].clone()
        forbidden = torch.arange(self.vocabulary) * 0.618 % 1.0 < self.forbidden
        bias = torch.zeros(self.vocabulary).masked_fill(forbidden, -math.inf)
        bias[-1] = 0.0
        return hidden * self.scale, weight, bias

    def draw(self) -> Draw | None:
        if not self.temperature:
            return None
        seed = self.seed - (1 << 64 if self.seed >> 63 else 0)
        keys, positions = torch.full((self.rows,), seed), torch.arange(self.rows)
        return Draw(keys=keys, positions=positions, inverse_temperature=1 / self.temperature)

    def check(self, state, hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
        x = logits_of(hidden, weight, bias)
        local = dataclasses.replace(state, token=state.token - self.first_token, argmax=state.argmax - self.first_token)
        # Rounding of the products grows with the logits; probabilities feel it absolutely.
        tolerance = 2e-6 * max(1.0, float(x[x.isfinite()].abs().max()) / 4)
        check(local.stats(), x, tolerance)
        draw = self.draw()
        if draw is None:
            assert torch.equal(state.token, state.argmax)
            return
        scores = x / self.temperature + gumbel(draw.keys, draw.positions, self.first_token, self.vocabulary).double()
        chosen = scores.gather(1, local.token.unsqueeze(1)).squeeze(1)
        assert (chosen >= scores.amax(dim=1) - 20 * tolerance / min(self.temperature, 1.0)).all()


cases = st.builds(
    Case,
    rows=st.integers(1, 40),
    vocabulary=st.integers(1, 300),
    width=st.integers(1, 70),
    first_token=st.integers(0, 100),
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    forbidden=st.sampled_from([0.0, 0.5, 0.98]),
    duplicates=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases, max_logits=st.integers(200, 5000), max_weights=st.integers(500, 9000), max_rows=st.integers(1, 40))
def test_any_shape_naive(case, max_logits, max_weights, max_rows) -> None:
    hidden, weight, bias = case.inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_head_naive, "MAX_ROWS", max_rows)
        patch.setattr(token_head_naive, "MAX_LOGITS", max_logits)
        patch.setattr(token_head_naive, "MAX_WEIGHTS", max_weights)
        logits = Logits(bias=bias)
        state = token_head_naive.scan(hidden, weight, logits, case.draw(), first_token=case.first_token)
    case.check(state, hidden, weight, bias)


@needs_triton
@settings(max_examples=20 if covering.FULL else 10, deadline=None, derandomize=True)
@given(
    case=cases,
    rows=st.sampled_from([16, 32]),
    tokens=st.sampled_from([32, 64, 128]),
    width=st.sampled_from([16, 32, 64]),
    noise=st.sampled_from([32, 64, 128]),
    programs=st.integers(1, 12),
)
def test_any_shape_triton(case, rows, tokens, width, noise, programs) -> None:
    from partsong.kernels.token_head_launch import scan
    from partsong.kernels.token_head_tiles import Tiles

    tiles = Tiles(rows=rows, tokens=tokens, width=width, noise=noise, num_warps=4, num_stages=2)
    with forced("triton"):
        hidden, weight, bias = case.inputs()
        logits, first_token = Logits(bias=bias), case.first_token
        state = scan(hidden, weight, logits, case.draw(), first_token=first_token, tiles=tiles, programs=programs)
        case.check(state, hidden, weight, bias)
