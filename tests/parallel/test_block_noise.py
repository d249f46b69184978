"""What a scheduler draws without a generator follows the seed and the block, not the process."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from partsong import CascadePipeline, TimestepPipeline
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.samplers import generate
from tests.parallel.dual_worker import call
from tests.parallel.timestep_worker import FRAMES, pipeline


def drawn(
    strategy: Strategy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, dict[float, set[float]]]:
    """A video, and the first number that every step would draw, by its time."""
    numbers: dict[float, set[float]] = defaultdict(set)
    step = FlowMatchEulerDiscreteScheduler.step

    def watched(self: Any, output: Any, time: Any, *rest: Any, **knobs: Any) -> Any:
        state = torch.get_rng_state()
        numbers[float(time)].add(float(torch.rand(())))
        torch.set_rng_state(state)
        return step(self, output, time, *rest, **knobs)

    pipe = pipeline(FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True))
    torch.manual_seed(seed)
    with monkeypatch.context() as patch, Mesh(stage=1) as mesh, parallelize(pipe, strategy, mesh=mesh) as plan:
        patch.setattr(FlowMatchEulerDiscreteScheduler, "step", watched)
        return generate(plan, **call(FRAMES, False)).frames, numbers


@pytest.mark.parametrize("strategy", [CascadePipeline(), TimestepPipeline()], ids=lambda each: type(each).__name__)
def test_every_block_has_noise_of_its_own(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    video, numbers = drawn(strategy, 1, monkeypatch)
    assert {len(each) for each in numbers.values()} == {3}, "three blocks"
    again, same = drawn(strategy, 2, monkeypatch)
    assert torch.equal(video, again) and numbers == same
