"""The policy loss against numbers worked out by hand, finite differences, and a bandit whose best arm is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.reasoning.threads import Fork, TokenRun
from partsong_zoo.training.policy_loss import per_token, policy_loss
from partsong_zoo.training.rewards import group_advantages
from partsong_zoo.training.thread_batch import pack_threads
from partsong_zoo.training.thread_training import log_likelihoods
from tests.reasoning.local_models import EOS, all_of, engine, llama, request, run, tokenizer

TEXTS = torch.tensor([0, 0, 0, 1])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -2.0], dtype=torch.float64)
#: exp(new - old): rises too far, inside, falls below (but that is wrong for a good text), rises (wrong for a bad one).
RATIOS = torch.tensor([1.5, 1.1, 0.5, 1.4], dtype=torch.float64)


def of(ratios: Tensor = RATIOS, **options: Any) -> Any:
    old = torch.log(torch.full((4,), 0.3, dtype=torch.float64))
    return policy_loss(old + ratios.log(), old, ADVANTAGES, TEXTS, **options)


def test_clipping_and_the_three_ways_to_count_by_hand() -> None:
    # min(1.5, 1.2), 1.1, min(0.5, 0.8), min(-2.8, -2.4)
    gains = [1.2, 1.1, 0.5, -2.8]
    assert float(of().loss) == pytest.approx(-sum(gains) / 4)
    assert float(of(normalise="sequence").loss) == pytest.approx(-(sum(gains[:3]) / 3 + gains[3]) / 2)
    assert float(of(normalise="constant", most_tokens=10).loss) == pytest.approx(-sum(gains) / 20)
    assert of().clipped == 0.25
    assert float(of(clip=(0.2, 0.6)).loss) == pytest.approx(-(1.5 + 1.1 + 0.5 - 2.8) / 4)
    assert float(of(clip=(0.0, 0.0)).loss) == pytest.approx(-(1.0 + 1.0 + 0.5 - 2.8) / 4)


def test_bad_texts_are_clipped_below() -> None:
    assert float(of(torch.tensor([1.0, 1.0, 1.0, 0.5]).double()).loss) == pytest.approx(-(3 - 2 * 0.8) / 4)


def test_the_pull_towards_a_reference_by_hand() -> None:
    old = torch.log(torch.full((4,), 0.3, dtype=torch.float64))
    reference = old + torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64)
    found = policy_loss(old, old, ADVANTAGES, TEXTS, reference=reference, divergence_weight=0.1)
    apart = [0.0, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5, math.e - 2]
    assert found.divergence == pytest.approx(sum(apart) / 4)
    assert float(found.loss) == pytest.approx(-(1 + 1 + 1 - 2) / 4 + 0.1 * sum(apart) / 4)


def test_the_pull_is_the_divergence_on_average() -> None:
    """Summed over all tokens, each as often as it is drawn, the estimate is KL(new || reference)."""
    torch.manual_seed(0)
    new, reference = (torch.randn(7, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = float((new.exp() * (new - reference)).sum())
    apart = [
        policy_loss(n[None], n[None], torch.zeros(1), torch.zeros(1, dtype=torch.long), reference=r[None],
                    divergence_weight=1.0).divergence
        for n, r in zip(new, reference, strict=True)
    ]  # fmt: skip
    assert sum(float(n.exp()) * one for n, one in zip(new, apart, strict=True)) == pytest.approx(exact)


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("pulled", [False, True])
def test_the_gradient_is_that_of_finite_differences(normalise: Any, pulled: bool) -> None:
    torch.manual_seed(1)
    old, advantages, reference = (torch.randn(9, dtype=torch.float64) for _ in range(3))
    new = (old + 0.3 * torch.randn(9, dtype=torch.float64)).requires_grad_()
    texts = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2])
    options: dict[str, Any] = {"normalise": normalise, "most_tokens": 8 if normalise == "constant" else None}
    if pulled:
        options |= {"reference": reference, "divergence_weight": 0.05}
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, texts, **options).loss, (new,))


def test_on_its_own_samples_the_gradient_is_the_policy_gradient() -> None:
    """Where new = old the loss has the gradient of -mean(A log p), whatever the clips."""
    new = torch.randn(4, dtype=torch.float64, requires_grad=True)
    policy_loss(new, new.detach(), ADVANTAGES, TEXTS).loss.backward()
    assert new.grad is not None and torch.allclose(new.grad, -ADVANTAGES / 4)


def test_the_reward_rises_on_a_bandit() -> None:
    """Twenty steps, groups of 16 of four arms, each drawn from the policy; the second arm pays."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer, rewards = torch.optim.SGD([logits], lr=4.0), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        old = logits.detach().log_softmax(0)
        arms = torch.multinomial(old.exp(), 16, replacement=True, generator=generator)
        paid = [float(arm == 1) for arm in arms]
        advantages = torch.tensor(group_advantages(paid), dtype=torch.float64)
        for _ in range(2):
            new = logits.log_softmax(0)[arms]
            optimizer.zero_grad()
            policy_loss(new, old[arms], advantages, torch.arange(16), normalise="sequence").loss.backward()
            optimizer.step()
        rewards.append(sum(paid) / 16)
    assert rewards[0] < 0.5 and min(rewards[-3:]) > 0.9
    assert float(logits.detach().softmax(0)[1]) > 0.9


def test_values_of_texts_become_values_of_tokens() -> None:
    assert per_token(torch.tensor([0.5, -0.5]), torch.tensor([1, 0, 0, 1])).tolist() == [-0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": (1.5, 0.2)}, "clip="),
        ({"normalise": "text"}, "normalise='text'"),
        ({"normalise": "constant"}, "most_tokens=None"),
        ({"most_tokens": 5}, "most_tokens=5"),
        ({"normalise": "constant", "most_tokens": 2}, "a text has 3 tokens"),
        ({"divergence_weight": 0.1}, "divergence_weight=.*give both"),
        ({"reference": torch.zeros(4)}, "divergence_weight=.*give both"),
        ({"reference": torch.zeros(3), "divergence_weight": 0.1}, "reference has shape"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        of(**options)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one token"):
        policy_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.zeros(0))


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_reward_of_a_model_rises_over_twenty_steps() -> None:
    """Samples of the engine, their packed texts, advantages and the loss together: five of 26 letters are paid."""
    paid = set("abcde")

    def trained() -> list[float]:
        model, rewards = llama(initializer_range=0.1).float(), []
        model.set_attn_implementation("sdpa")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(20):
            asked = [request("go on:", seed=1000 * step + number, max_tokens=1) for number in range(24)]
            drawn = run(all_of(engine(model, pack=False), asked))
            worth = [float(one.text in paid) for one in drawn]
            rewards.append(sum(worth) / len(worth))
            prompt = TokenRun(tuple(tokenizer()("go on:").input_ids))
            assert all(one.tokens is not None for one in drawn)
            batch = pack_threads([(prompt, TokenRun(one.tokens or (EOS,), learn=True)) for one in drawn], length=64)
            texts = batch.texts[batch.learn]
            advantages = per_token(torch.tensor(group_advantages(worth)), texts)
            new = log_likelihoods(model, batch)
            optimizer.zero_grad()
            policy_loss(new, new.detach(), advantages, texts).loss.backward()
            optimizer.step()
        return rewards

    rewards = trained()
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.9
    assert trained() == rewards


def test_one_step_raises_what_was_rewarded_and_lowers_the_rest() -> None:
    model = llama(initializer_range=0.1)
    model.set_attn_implementation("sdpa")
    thread = (TokenRun((4,)), TokenRun((5, 6), True))
    fork = Fork((thread, (TokenRun((7,)), TokenRun((8,), True))))
    batch = pack_threads([(TokenRun((3,)), fork, TokenRun((9,)), TokenRun((last, 1), True)) for last in (10, 11)])
    texts = batch.texts[batch.learn]
    before = log_likelihoods(model, batch)
    loss = policy_loss(before, before.detach(), per_token(torch.tensor([0.5, -0.5]).double(), texts), texts).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
        after = log_likelihoods(model, batch)
    change = [float((after - before.detach())[texts == number].sum()) for number in (0, 1)]
    assert change[0] > 0 > change[1]
