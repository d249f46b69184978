"""TimestepPipeline: the causal model's own video, with a window and a sink its definition, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    LCMScheduler,
)

from partsong import TimestepPipeline
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.ranks.launch import launch
from partsong.samplers.pipeline.scheduler_checks import check_memoryless
from tests.parallel import timestep_worker


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return timestep_worker.ranks(1)


@pytest.fixture(scope="module", params=[2, *(pytest.param(nproc, marks=pytest.mark.full) for nproc in (3, 4))])
def several(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(timestep_worker.ranks, request.param, request.param, timestep_worker.NAMES)


@pytest.mark.parametrize(("window", "sink"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.full), (3, 0)])
def test_a_window_and_a_sink_are_their_definition(window: int, sink: int) -> None:
    assert timestep_worker.definition(window, sink) <= 1e-10


def test_a_window_that_holds_the_past_is_the_causal_model(alone: dict[str, Any], several: dict[str, Any]) -> None:
    assert max(alone["whole"] + several["whole"]) <= 1e-10


def test_steps_times_layers_are_the_causal_model() -> None:
    assert launch(timestep_worker.layered, 4) <= 1e-10


def test_the_same_bits_on_any_number_of_ranks(alone: dict[str, Any], several: dict[str, Any]) -> None:
    for name, video in several["videos"].items():
        assert torch.equal(alone["videos"][name], video), name


def test_what_is_sent_is_what_was_predicted(several: dict[str, Any]) -> None:
    sent, predicted, _ = several["counted"]
    assert sent == predicted
    assert min(sent) > 0


def test_frames_come_block_by_block(alone: dict[str, Any], several: dict[str, Any]) -> None:
    assert alone["counted"][2] == several["counted"][2] == [5, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("frames", "num_frames=25 is 7 latent frames, but the model works in blocks of 2; use 21 or 29"),
        ("steps", "ranks along 1 denoising steps"),
        ("scheduler", "UniPCMultistepScheduler remembers earlier steps"),
        ("model", "needs a model that sees the past alone"),
        ("callback", "callback_on_step_end cannot be honoured"),
        ("hooks", "none"),
    ],
)
def test_refusals(alone: dict[str, Any], several: dict[str, Any], name: str, words: str) -> None:
    if name not in ("steps", "scheduler"):  # one rank makes all steps itself
        assert words in alone["refusals"][name]
    assert words in several["refusals"][name]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"window": 0}, "window=0; use a positive integer"),
        ({"sink": -1}, "sink=-1; use an integer of 0 or more"),
        ({"pipe_degree": 2, "layers": (4,)}, "names 1 stages, not pipe_degree=2"),
        ({"degree": 0}, "TimestepPipeline: degree=0; use a positive integer, or None"),
    ],
)
def test_refused_knobs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        TimestepPipeline(**knobs).validate()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("scheduler", "remembers"),
    [
        (FlowMatchEulerDiscreteScheduler(), False),
        (LCMScheduler(), False),
        (FlowMatchHeunDiscreteScheduler(), True),
        (DPMSolverMultistepScheduler(), True),
    ],
)
def test_schedulers_that_remember(scheduler: Any, remembers: bool) -> None:
    scheduler.set_timesteps(5)
    before = str(vars(scheduler))
    try:
        check_memoryless(scheduler, torch.zeros(1, 4, 2, 3, 3))
        found = False
    except UnsupportedError:
        found = True
    assert found == remembers
    assert str(vars(scheduler)) == before
