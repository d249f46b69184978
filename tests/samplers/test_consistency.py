"""Consistency sampling where the consistency function is known, and its times as noise levels of rectified flow."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError
from partsong.samplers import flow_estimate, flow_sigmas, trigflow_times
from partsong.samplers.denoising.consistency import consistency

VARIANCE = 0.36


def along_the_path(x: Tensor, time: float) -> Tensor:
    """Where the probability flow of a normal variable ends: a point keeps its quantile."""
    return x * math.sqrt(VARIANCE / (math.cos(time) ** 2 * VARIANCE + math.sin(time) ** 2))


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_samples_of_a_known_distribution_have_it(steps: int) -> None:
    drawn = consistency(
        along_the_path, lambda step: seeds.noise(seeds.derive(7, step), (200_000,)).double(), trigflow_times(steps)
    )
    # The first time stops just short of pure noise: tan(t) = 80.
    spread = float(drawn.std())
    assert spread == pytest.approx(math.sqrt(VARIANCE), rel=6e-3)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=6e-3)


def test_the_loop_is_estimate_and_noise_in_turn() -> None:
    noises = [torch.tensor([1.0, -2.0], dtype=torch.float64) * (i + 1) for i in range(3)]
    times, x = trigflow_times(3, between=(1.2, 0.4)), None
    for step, (time, after) in enumerate(pairwise(times)):
        x = math.sin(time) * noises[0] if x is None else x
        clean = torch.tanh(x) * time
        x = math.cos(after) * clean + math.sin(after) * (noises[step + 1] if after else 0.0)
    assert x is not None
    got = consistency(lambda x, t: torch.tanh(x) * t, lambda step: noises[step], times)
    torch.testing.assert_close(got, x, rtol=1e-14, atol=1e-14)


def test_times_are_those_of_the_few_step_models() -> None:
    assert trigflow_times(4) == [math.atan(80.0), 1.5, 1.4, 1.0, 0.0]
    assert len(trigflow_times(9)) == 10
    assert flow_sigmas(trigflow_times(1)) == [pytest.approx(80 / 81), 0.0]


def test_a_flow_model_estimates_the_same_clean_latents() -> None:
    clean, noise, time = torch.tensor([0.3, -1.0]), torch.tensor([2.0, 0.5]), 1.1
    latents = math.cos(time) * clean + math.sin(time) * noise

    def velocity(x: Tensor, sigma: float) -> Tensor:
        torch.testing.assert_close(x, (1 - sigma) * clean + sigma * noise)
        return noise - clean

    torch.testing.assert_close(flow_estimate(velocity)(latents, time), clean)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: trigflow_times(0), "num_steps=0"),
        (lambda: trigflow_times(3, between=(1.0,)), "give 2"),
        (lambda: trigflow_times(3, between=(1.0, 1.2)), "do not fall"),
        (lambda: consistency(along_the_path, lambda _: torch.zeros(1), [1.0]), "two or more"),
        (lambda: consistency(along_the_path, lambda _: torch.zeros(1), [1.0, 0.5]), "fall to 0"),
    ],
)
def test_refusals(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(ArgumentError, match=words):
        call()
