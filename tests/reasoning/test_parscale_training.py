"""Training streams: what is frozen stays, what is learned lowers the loss, and a stop changes nothing."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.parallel.ranks.launch import launch
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights
from partsong_zoo.training.parscale import StreamLesson, learning_rate, next_token_loss, train
from tests.reasoning.parscale_reference import streams, tiny


def lesson(step: int, rows: int = 6, length: int = 8, by: int = 7) -> StreamLesson:
    """Texts that count on from a random token; the first two of a row are only read."""
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(0, 61, (rows, 1), generator=draw)
    ids = (start + by * torch.arange(length)) % 61
    learned = torch.ones_like(ids, dtype=torch.bool)
    learned[:, :2] = False
    learned[0, 5:] = False  # rows of unequal weight
    return StreamLesson(ids, learned)


def small(**more: Any) -> Any:
    return tiny("llama", initializer_range=0.05, **more).float()


def others(step: int) -> StreamLesson:
    """What a backbone has not seen that learned `lesson`."""
    return lesson(step, by=11)


def loss_of(model: Any, *weights: StreamWeights, by: int = 7) -> float:
    with ParScale(model, *weights), torch.no_grad():
        one = lesson(10**6, rows=64, by=by)
        return float(next_token_loss(model, one)) / int(one.learned.sum())


def test_the_loss_is_the_likelihood_of_the_learned_tokens() -> None:
    model, one = tiny("llama"), lesson(3)
    shares = model(one.ids).logits.softmax(-1)
    wanted = 0.0
    shares = shares.detach()
    for row in range(6):
        for place in range(2, 8):
            if one.learned[row, place]:
                wanted -= math.log(float(shares[row, place - 1, one.ids[row, place]]))
    assert float(next_token_loss(model, one).detach()) == pytest.approx(wanted, rel=1e-6)


def test_the_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 200) for step in range(200)]
    assert rates[9] == 1.0 == max(rates) and rates[0] == 0.1
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert 0 < learning_rate(0, 1) <= 1


def test_recycling_leaves_the_backbone_and_lowers_the_loss() -> None:
    model = small()
    train(model, None, lesson, steps=30, accelerator=Accelerator(cpu=True))
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    weights = StreamWeights.new(model, 2, prefix_length=4)
    first = {name: value.clone() for name, value in weights.state_dict().items()}
    before = loss_of(model, weights, by=11)
    losses = train(model, weights, others, steps=60, rate=2e-2, frozen=True, accelerator=Accelerator(cpu=True))
    assert all(torch.equal(value, frozen[name]) for name, value in model.state_dict().items())
    assert all(not torch.equal(value, first[name]) for name, value in weights.state_dict().items())
    assert loss_of(model, weights, by=11) < before - 0.2
    assert len(losses) == 60 and losses[-1] < losses[0] - 0.2
    assert all(each.requires_grad and each.grad is None for each in model.parameters())
    assert not model.base_model._forward_hooks


def test_training_from_nothing_learns_backbone_and_streams() -> None:
    model = small()
    weights = StreamWeights.new(model, 3, prefix_length=4)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(weights.state_dict()), loss_of(model, weights)
    train(model, weights, lesson, steps=40, accelerator=Accelerator(cpu=True))
    assert all(not torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert all(not torch.equal(value, before[1][name]) for name, value in weights.state_dict().items())
    assert loss_of(model, weights) < before[2] - 1.0
    assert not model.training


def test_gradients_are_those_of_differences() -> None:
    """Through prefix, aggregator and backbone, against finite differences in float64."""
    one = lesson(0)
    model: Any = tiny("llama")
    weights = streams(model, 2, prefix_length=3)
    with ParScale(model, weights):
        next_token_loss(model, one).backward()
        chosen = [
            (weights.prefix_k[0], (1, 0, 2, 3)),
            (weights.prefix_v[1], (0, 1, 0, 5)),
            (weights.aggregate_layer[0].weight, (4, 9)),
            (weights.aggregate_layer[2].bias, (1,)),
            (model.base_model.layers[0].self_attn.k_proj.weight, (2, 2)),
        ]
        for parameter, place in chosen:
            with torch.no_grad():
                ends = []
                for shift in (1e-5, -2e-5):
                    parameter[place] += shift
                    # In float64 to the end: the loss itself is taken in float32.
                    ends.append(_double_loss(model, one))
                parameter[place] += 1e-5
            assert parameter.grad is not None
            assert float(parameter.grad[place]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-4)


def _double_loss(model: Any, one: StreamLesson) -> float:
    picked = model(one.ids).logits[:, :-1].log_softmax(-1).gather(2, one.ids[:, 1:, None])[..., 0]
    return -float(picked[one.learned[:, 1:]].sum())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_stop_changes_nothing(tmp_path: Path, frozen: bool) -> None:
    def run(folder: Path | None, *stops: int) -> tuple[dict[str, Tensor], list[float]]:
        model, losses = small(), list[float]()
        weights = StreamWeights.new(model, 2, prefix_length=4)
        for number, stop in enumerate(stops):
            if number:  # another process would start from the same first weights
                model, weights = small(), StreamWeights.new(small(), 2, prefix_length=4)
            draw = _until(stop)
            try:
                losses += _train(model, weights, draw, frozen, folder)
            except _Stop:
                continue
        return {**model.state_dict(), **weights.state_dict()}, losses

    whole, losses = run(None, 12)
    stopped, rest = run(tmp_path / "run", 6, 12)
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())
    assert rest == losses[5:]
    kept = torch.load(tmp_path / "run" / "training.pt", weights_only=True)["weights"]
    assert any(name.startswith("model.") for name in kept) != frozen
    with pytest.raises(ArgumentError, match="give another folder"):
        _train(small(), StreamWeights.new(small(), 2, prefix_length=4), lesson, not frozen, tmp_path / "run")


class _Stop(Exception):
    pass


def _until(stop: int) -> Any:
    def draw(step: int) -> StreamLesson:
        if step == stop:
            raise _Stop
        return lesson(step)

    return draw


def _train(model: Any, weights: StreamWeights, draw: Any, frozen: bool, folder: Path | None) -> list[float]:
    return train(
        model, weights, draw, steps=12, frozen=frozen, folder=folder, save_every=5, accelerator=Accelerator(cpu=True)
    )


def test_rows_in_parts_are_the_same_step() -> None:
    found = []
    for rows in (None, 4, 1):
        model = small().double()
        weights = streams(model, 2, prefix_length=4)
        losses = train(model, weights, lesson, steps=3, rows_at_once=rows, accelerator=Accelerator(cpu=True))
        found.append((torch.tensor(losses), weights.prefix_k[0].detach(), model.state_dict()["model.norm.weight"]))
    for other in found[1:]:
        for left, right in zip(found[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def _on_a_rank() -> tuple[int, list[float], Tensor]:
    model, place = small().double(), Accelerator(cpu=True)
    weights = streams(model, 2, prefix_length=4)
    losses = train(model, weights, lesson, steps=3, accelerator=place)
    return place.num_processes, losses, weights.prefix_v[1].detach()


@pytest.mark.timeout(120)
def test_ranks_share_a_lesson() -> None:
    alone, together = _on_a_rank(), launch(_on_a_rank, 2)
    assert (alone[0], together[0]) == (1, 2)
    assert together[1] == pytest.approx(alone[1], rel=1e-9)
    torch.testing.assert_close(together[2], alone[2], rtol=1e-9, atol=1e-9)


def test_mistaken_arguments_are_refused() -> None:
    model = small()
    with pytest.raises(ArgumentError, match="nothing would be learned"):
        train(model, None, lesson, steps=1, frozen=True)
    with pytest.raises(ArgumentError, match="steps=0"):
        train(model, None, lesson, steps=0)
    with pytest.raises(ArgumentError, match="rows_at_once=0"):
        train(model, None, lesson, steps=1, rows_at_once=0)


def test_prefixes_may_learn_at_a_rate_of_their_own() -> None:
    """A first step of Adam moves every weight by its rate."""
    for rates, moved in (({}, (1e-3, 1e-3)), ({"prefix_rate": 5e-3}, (1e-3, 5e-3))):
        model = small()
        weights = streams(model, 2, prefix_length=4)
        before = [each.detach().clone() for each in (weights.aggregate_layer[0].weight, weights.prefix_v[0])]
        train(model, weights, lesson, steps=1, rate=1e-3, accelerator=Accelerator(cpu=True), **rates)
        for old, new, rate in zip(before, (weights.aggregate_layer[0].weight, weights.prefix_v[0]), moved, strict=True):
            assert float((new - old).detach().abs().median()) == pytest.approx(rate * learning_rate(0, 1), rel=0.02)
