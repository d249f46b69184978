"""The losses of certain decoders against values worked out by hand, enumerated cases, and gradients of known sign."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong_zoo.lists.distillation import (
    certain_entropy,
    certainty_loss,
    consistency_loss,
    discrimination_loss,
    group_advantages,
    masked_loss,
    mean_log_prob,
    own_guess,
    reinforcement_loss,
    revision_loss,
)

EVERYWHERE = torch.ones(2, 3, dtype=torch.bool)
EQUAL = (torch.zeros(1), torch.zeros(1))
TOKENS = torch.zeros(2, 3, dtype=torch.int64)


def random_logits(seed: int, vocabulary: int = 5) -> Tensor:
    return torch.randn(2, 3, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(row: Tensor, temperature: float = 1.0) -> list[float]:
    weights = [math.exp(float(value) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def entropy(probs: list[float]) -> float:
    return -sum(p * math.log(p) for p in probs)


def places(where: Tensor) -> list[tuple[int, int]]:
    return [(int(row), int(place)) for row, place in where.nonzero()]


def gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_(True)
    loss(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_the_cross_entropy_is_the_mean_over_the_masked_places() -> None:
    logits, targets = random_logits(0), torch.tensor([[0, 1, 2], [3, 4, 0]])
    where = torch.tensor([[True, False, True], [False, True, False]])
    by_hand = [-math.log(softmax(logits[r, p])[int(targets[r, p])]) for r, p in places(where)]
    assert float(masked_loss(logits, targets, where)) == pytest.approx(sum(by_hand) / 3, rel=1e-6)


def test_nothing_masked_is_a_loss_of_zero_that_moves_nothing() -> None:
    logits, targets = random_logits(0), torch.zeros(2, 3, dtype=torch.int64)
    for loss in (masked_loss, certainty_loss):
        assert not gradient(lambda leaf, loss=loss: loss(leaf, targets, ~EVERYWHERE), logits).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_entropy_is_that_of_the_places_that_are_right(temperature: float) -> None:
    """Every case of two tokens at two places: which places count depends on which are right already."""
    for first, second in itertools.product([-1.5, 0.25, 2.0], repeat=2):
        logits = torch.tensor([[[first, 0.0], [second, 0.0]]], dtype=torch.float64)
        targets, where = torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
        right = [logits[0, 0]] * (first > 0) + [logits[0, 1]] * (second < 0)
        by_hand = [entropy(softmax(row, temperature)) for row in right]
        expected = sum(by_hand) / len(by_hand) if by_hand else 0.0
        measured = float(certain_entropy(logits, targets, where, temperature=temperature))
        assert measured == pytest.approx(expected, rel=1e-5)


def test_certainty_is_pushed_only_where_the_model_is_right() -> None:
    logits = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    targets, where = torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    pushed = gradient(lambda leaf: certain_entropy(leaf, targets, where), logits)
    # Descending raises the right token's logit and lowers the other; the place that is wrong stays as it is.
    assert pushed[0, 0, 0] < 0 < pushed[0, 0, 1]
    assert not pushed[0, 1].any()


def test_certainty_reduces_to_its_limits() -> None:
    logits, targets = random_logits(3), random_logits(3).argmax(-1)
    plain = masked_loss(logits, targets, EVERYWHERE)
    torch.testing.assert_close(certainty_loss(logits, targets, EVERYWHERE, weight=0.0), plain, rtol=0, atol=0)
    hot = certain_entropy(logits, targets, EVERYWHERE, temperature=1e6)
    cold = certain_entropy(logits, targets, EVERYWHERE, temperature=1e-3)
    assert float(hot) == pytest.approx(math.log(5), rel=1e-5)
    assert float(cold) == pytest.approx(0.0, abs=1e-6)
    weighed = certainty_loss(logits, targets, EVERYWHERE, weight=3.0, temperature=2.0)
    assert float(weighed) == pytest.approx(
        float(plain) + 3.0 * float(certain_entropy(logits, targets, EVERYWHERE, temperature=2.0)), rel=1e-6
    )


def test_consistency_is_least_where_the_distributions_are_equal() -> None:
    early, late = random_logits(1), random_logits(2)
    where = torch.tensor([[True, True, False], [False, False, True]])
    by_hand = []
    for row, place in places(where):
        p, q = softmax(late[row, place]), softmax(early[row, place])
        by_hand.append(-sum(a * math.log(b) for a, b in zip(p, q, strict=True)))
    assert float(consistency_loss(early, late, where)) == pytest.approx(sum(by_hand) / 3, rel=1e-6)
    at_late = [entropy(softmax(late[row, place])) for row, place in places(where)]
    assert float(consistency_loss(late, late, where)) == pytest.approx(sum(at_late) / 3, rel=1e-6)
    assert gradient(lambda leaf: consistency_loss(leaf, late, where), late).abs().max() < 1e-7
    assert not gradient(lambda leaf: consistency_loss(early, leaf, where) + 0 * leaf.sum(), late).any()


def test_the_mean_log_probability_is_each_rows_own() -> None:
    logits, tokens = random_logits(4), torch.tensor([[4, 3, 2], [1, 0, 1]])
    where = torch.tensor([[True, True, False], [False, False, False]])
    first = sum(math.log(softmax(logits[0, p])[int(tokens[0, p])]) for p in (0, 1)) / 2
    assert mean_log_prob(logits, tokens, where).tolist() == pytest.approx([first, 0.0], rel=1e-6)


def test_discrimination_by_hand_and_at_its_limits() -> None:
    real = (torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]))
    fake = (torch.tensor([-4.0, -1.0]), torch.tensor([-3.0, -3.0]))

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    by_hand = [
        -math.log(sigmoid(0.7 * (a - b))) - 0.3 * math.log(1 - sigmoid(0.7 * (c - d)))
        for a, b, c, d in zip(*(pair.tolist() for pair in (*real, *fake)), strict=True)
    ]
    assert float(discrimination_loss(real, fake, beta=0.7, alpha=0.3)) == pytest.approx(sum(by_hand) / 2, rel=1e-6)
    same = (real[0], real[0])
    assert float(discrimination_loss(same, same, beta=5.0, alpha=0.5)) == pytest.approx(1.5 * math.log(2), rel=1e-6)
    without = discrimination_loss(real, fake, beta=0.7, alpha=0.0)
    torch.testing.assert_close(without, discrimination_loss(real, real, beta=0.7, alpha=0.0))


def test_discrimination_raises_real_texts_and_lowers_fake_ones() -> None:
    student = [torch.zeros(1, requires_grad=True) for _ in range(4)]
    discrimination_loss((student[0], student[1]), (student[2], student[3])).backward()
    real, of_reference, fake, _ = (each.grad for each in student)
    assert real is not None and fake is not None
    assert float(real) < 0 < float(fake)
    assert of_reference is None, "the reference has no gradient"


def test_a_guess_stands_in_place_of_masks_only_and_has_no_gradient() -> None:
    logits = random_logits(5).requires_grad_(True)
    tokens, where = torch.full((2, 3), 9), torch.tensor([[True, False, True], [False, False, True]])
    guess = own_guess(logits, tokens, where)
    assert not guess.requires_grad
    for row, place in itertools.product(range(2), range(3)):
        best = max(range(5), key=lambda token, row=row, place=place: float(logits.detach()[row, place, token]))
        assert int(guess[row, place]) == (best if where[row, place] else 9)
    barred = int(logits[0, 0].argmax())
    second = int(logits[0, 0].detach().topk(2).indices[1])
    assert int(own_guess(logits, tokens, where, barred=barred)[0, 0]) == second


def test_revision_counts_only_what_the_expert_changed() -> None:
    logits, expert = random_logits(6), torch.tensor([[0, 1, 2], [3, 4, 0]])
    draft = torch.tensor([[0, 2, 2], [1, 4, 1]])
    where = torch.tensor([[True, True, True], [True, True, False]])
    by_hand = [-math.log(softmax(logits[r, p])[int(expert[r, p])]) for r, p in ((0, 1), (1, 0))]
    assert float(revision_loss(logits, draft, expert, where)) == pytest.approx(sum(by_hand) / 2, rel=1e-6)
    assert float(revision_loss(logits, expert, expert, where)) == 0.0


# --- reinforcement ----------------------------------------------------------------------------------------------------


def by_numpy(right: Any, speed: Any) -> tuple[Any, Any]:
    """The advantages written out group by group."""
    sums, kept = np.zeros(speed.shape), np.zeros(len(speed), dtype=bool)
    for group in range(len(speed)):
        for values in (right[group].astype(float), speed[group]):
            if values.std() > 0:
                sums[group] += (values - values.mean()) / values.std()
        kept[group] = right[group].any() and np.ptp(speed[group]) >= 0.01
    values = np.zeros(speed.shape)
    if kept.any():
        values[kept] = (sums[kept] - sums[kept].mean()) / sums[kept].std()
    return values, kept


def test_advantages_are_those_written_out_group_by_group() -> None:
    rng = np.random.default_rng(0)
    right, speed = rng.random((6, 5)) < 0.5, rng.uniform(1, 4, (6, 5))
    right[1] = False  # all wrong
    speed[2] = 2.0 + 0.001 * np.arange(5)  # as fast as each other
    right[3] = True  # all right: only the speed tells them apart
    values, kept = group_advantages(torch.from_numpy(right), torch.from_numpy(speed))
    expected, which = by_numpy(right, speed)
    assert kept.tolist() == which.tolist() and not kept[1] and not kept[2] and kept[3]
    assert values.numpy() == pytest.approx(expected, abs=1e-5)
    assert not values[1].any() and not values[2].any()
    assert float(values[kept].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(values[kept].square().mean()) == pytest.approx(1.0, rel=1e-5)


def test_no_group_may_be_kept() -> None:
    values, kept = group_advantages(torch.zeros(2, 3, dtype=torch.bool), torch.rand(2, 3) + torch.arange(3))
    assert not kept.any() and not values.any()


def test_reinforcement_is_the_policy_gradient_at_the_model_that_drew() -> None:
    """With equal log-probabilities the ratio is 1 and the divergence 0 with a gradient of 0."""
    same = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64)
    advantages, right = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.tensor([True, False, True])
    slope = gradient(lambda new: reinforcement_loss(new, same, same, advantages, right), same)
    expected = -advantages / 3 - 0.1 * torch.tensor([0.5, 0.0, 0.5])
    torch.testing.assert_close(slope, expected)
    loss = reinforcement_loss(same, same, same, advantages, right)
    assert float(loss) == pytest.approx(-(1.0 - 2.0 + 0.5) / 3 + 0.1 * (0.5 + 2.0) / 2, rel=1e-9)


def test_reinforcement_clips_and_pulls_to_the_reference() -> None:
    old = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    new = torch.log(torch.tensor([0.8, 0.55], dtype=torch.float64))
    reference = torch.log(torch.tensor([0.4, 0.5], dtype=torch.float64))
    advantages, wrong = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
    apart = [q / p - math.log(q / p) - 1 for q, p in ((0.4, 0.8), (0.5, 0.55))]
    expected = -(1.2 - 0.01 * apart[0] + 1.1 - 0.01 * apart[1]) / 2
    assert float(reinforcement_loss(new, old, reference, advantages, wrong)) == pytest.approx(expected, rel=1e-9)
    slope = gradient(lambda leaf: reinforcement_loss(leaf, old, leaf.detach(), advantages, wrong), new)
    assert slope[0] == 0 and slope[1] < 0, "the first ratio is 1.6 and clipped at 1.2"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: certainty_loss(random_logits(0), torch.zeros(2, 3).long(), EVERYWHERE, temperature=0.0),
            "temperature",
        ),
        (lambda: certainty_loss(random_logits(0), torch.zeros(2, 3).long(), EVERYWHERE, weight=-1.0), "weight=-1.0"),
        (lambda: discrimination_loss(EQUAL, EQUAL, beta=0.0), "beta=0.0"),
        (lambda: group_advantages(torch.zeros(2, 3).bool(), torch.zeros(2, 4)), r"right has shape \(2, 3\)"),
    ],
)
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()
