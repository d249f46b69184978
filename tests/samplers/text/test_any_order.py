"""Guesses for any-order models: the text of one token at a time, and the distribution that the chain rule gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from partsong.errors import ArgumentError
from partsong.samplers.text import any_order
from partsong.samplers.text.any_order import decode_any_order


class TwoStreams:
    """A random model of two layers in float64: tokens see the ranks up to their own, queries those below `seen`."""

    def __init__(self, vocab: int, length: int, width: int = 16) -> None:
        draw = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[0] ** 0.5

        self.embed, self.place = 3 * weight(vocab, width), 3 * weight(length, width)
        self.query, self.head = weight(1, width), 4 * weight(width, vocab)
        self.layers = [[weight(width, width) for _ in range(5)] for _ in range(2)]
        self.calls = 0

    def __call__(self, tokens: Tensor, rank: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Logits of the places."""
        self.calls += 1
        length, asked = tokens.shape[1], places.shape[1]
        x = torch.cat([self.embed[tokens] + self.place, self.query + self.place[places]], 1)
        limit = torch.cat([rank + 1, seen], 1)
        sees = torch.zeros(len(tokens), length + asked, length + asked, dtype=torch.bool)
        sees[:, :, :length] = rank[:, None, :] < limit[:, :, None]
        sees |= torch.eye(length + asked, dtype=torch.bool)
        for q, k, v, up, down in self.layers:
            y = scaled_dot_product_attention(
                (x @ q)[:, None], (x @ k)[:, None], (x @ v)[:, None], attn_mask=sees[:, None]
            )
            x = x + y[:, 0]
            x = x + (x @ up).tanh() @ down
        return x[:, length:] @ self.head


def orders(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.rand(count, length, generator=torch.Generator().manual_seed(seed)).argsort(1)


def test_the_model_sees_what_it_should() -> None:
    """What comes later in the order changes nothing, and what comes before it does."""
    model, order = TwoStreams(5, 6), orders(1, 6)
    tokens, rank, places = torch.randint(5, (1, 6), generator=torch.Generator().manual_seed(1)), order.argsort(1), order
    seen = torch.arange(6)[None]
    before = model(tokens, rank, places, seen)
    for changed in range(6):
        other = tokens.clone()
        other[0, order[0, changed]] = (other[0, order[0, changed]] + 1) % 5
        differs = (model(other, rank, places, seen) - before).abs().amax(-1)[0] > 1e-12
        assert differs.tolist() == [rank_ > changed for rank_ in range(6)]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("given", [0, 3])
def test_guesses_change_nothing(temperature: float, given: int) -> None:
    model, order = TwoStreams(7, 12), orders(60, 12)
    tokens = torch.randint(7, (60, 12), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"given": given, "temperature": temperature, "seed": 4}
    one = decode_any_order(model, tokens, order, drafts=1, **options)
    assert one.forwards.tolist() == [12 - given] * 60
    assert torch.equal(one.tokens.gather(1, order[:, :given]), tokens.gather(1, order[:, :given]))
    for drafts in (2, 3, 5, 20):
        model.calls = 0
        guessed = decode_any_order(model, tokens, order, drafts=drafts, **options)
        assert torch.equal(guessed.tokens, one.tokens)
        assert (guessed.forwards <= one.forwards).all()
        assert guessed.forwards.sum() < 0.95 * one.forwards.sum()
        assert model.calls == guessed.forwards.max()
        assert ((guessed.rejected >= 0) & (guessed.rejected <= guessed.drafted)).all()
    alone = decode_any_order(model, tokens[:1], order[:1], drafts=3, **options)
    assert torch.equal(alone.tokens, one.tokens[:1])


def chain_rule(model: TwoStreams, order: Tensor, vocab: int) -> Tensor:
    """The probability of every text, from one token at a time."""
    length = order.shape[1]
    texts = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    order = order.expand(len(texts), -1)
    probs = torch.ones(len(texts), dtype=torch.float64)
    for rank in range(length):
        place = order[:, rank : rank + 1]
        logits = model(texts, order.argsort(1), place, torch.full_like(place, rank))
        probs *= logits.softmax(-1).gather(2, texts.gather(1, place)[..., None])[:, 0, 0]
    return probs


def distance(texts: Tensor, probs: Tensor, vocab: int) -> float:
    """Total variation of drawn texts from enumerated probabilities."""
    number = (texts * vocab ** torch.arange(texts.shape[1] - 1, -1, -1)).sum(1)
    return float((torch.bincount(number, minlength=len(probs)) / len(texts) - probs).abs().sum()) / 2


def test_the_distribution_is_the_enumerated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chance a perfect sampler would be 0.02 away from 81 texts, if they were equally likely."""
    model, order, num = TwoStreams(3, 4), torch.tensor([[2, 0, 3, 1]]), 20_000
    probs = chain_rule(model, order, 3)
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)
    empty, orders_ = torch.zeros(num, 4, dtype=torch.int64), order.expand(num, -1)
    decoded = decode_any_order(model, empty, orders_, drafts=4)
    assert distance(decoded.tokens, probs, 3) <= 0.03
    assert 0.02 * decoded.drafted.sum() < decoded.rejected.sum()
    # The control: guesses that are not asked for again.
    monkeypatch.setattr(any_order, "_leading", lambda right: right.shape[1] * torch.ones_like(right[:, 0]).long())
    assert distance(decode_any_order(model, empty, orders_, drafts=4).tokens, probs, 3) > 0.05


@pytest.mark.parametrize(
    ("tokens", "order", "options", "words"),
    [
        (torch.zeros(1, 3), torch.arange(3)[None], {}, "tokens and order int64"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.arange(4)[None], {}, "tokens and order int64"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[0, 1, 1]]), {}, "every position of its row once"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None], {"given": 4}, "given=4, but a text has 3 tokens"),
        (
            torch.zeros(1, 3, dtype=torch.int64),
            torch.arange(3)[None],
            {"drafts": 0},
            "drafts=0; use a positive integer",
        ),
        (torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None], {"temperature": -1.0}, "temperature=-1.0; use"),
    ],
)
def test_refused(tokens: Tensor, order: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        decode_any_order(TwoStreams(3, 4), tokens, order, **options)
    assert words in str(caught.value)
