"""Sliding windows: the pipeline itself where one window holds the video, averages written out where several do."""

from __future__ import annotations

import pytest
import torch

from partsong import DualParallel
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize
from partsong.samplers.long_video.sliding_windows import sliding_windows
from tests.parallel.dual_worker import call, pipeline
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error
from tests.parallel.turning_worker import TURNING, Moving, in_float64


def test_one_window_is_the_pipeline() -> None:
    pipe = pipeline()
    with torch.no_grad():
        assert torch.equal(sliding_windows(pipe, window=8, stride=4, **call(21)).frames, pipe(**call(21)).frames)


@pytest.mark.parametrize("name", ["HunyuanVideo", "Mochi"])
def test_windows_that_touch_are_videos_of_their_own(name: str) -> None:
    turning = TURNING[name]
    latents = turning.noise(6)
    with in_float64():
        pipe = turning.make(2, Moving())
        got = sliding_windows(pipe, window=3, stride=3, **turning.call(6, latents=latents)).frames
        apart = [pipe(**turning.call(3, latents=half)).frames for half in latents.split(3, dim=2)]
    assert error(got, torch.cat(apart, dim=2)) <= 1e-10


def test_windows_are_averaged_with_weights_that_fall_towards_their_ends() -> None:
    pipe = pipeline()
    noise = torch.randn(1, 4, 8, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    named = call(29, guided=False, num_inference_steps=1, latents=noise)
    got = sliding_windows(pipe, window=4, stride=3, **named).frames
    # One Euler step from noise level 1 to 0 takes the whole velocity off.
    text, time = named["prompt_embeds"], pipe.scheduler.timesteps[0].expand(1)
    total, weights = torch.zeros(8, 1, 4, 4, 6, dtype=torch.float64), torch.zeros(8)
    for start in (0, 3, 4):
        with torch.no_grad():
            seen = pipe.transformer(noise[:, :, start : start + 4], time, text, return_dict=False)[0]
        for place, weight in enumerate((1.0, 2.0, 2.0, 1.0)):
            total[start + place] += weight * seen[:, :, place]
            weights[start + place] += weight
    for frame in range(8):
        wanted = noise[:, :, frame] - total[frame] / weights[frame]
        torch.testing.assert_close(got[:, :, frame], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("knobs", [{"window": 4, "stride": 5}, {"window": 4, "stride": 0}])
def test_windows_that_leave_frames_out_are_refused(knobs: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="must overlap or touch"):
        sliding_windows(pipeline(), **knobs, **call(29))


def test_pipelines_without_such_a_model_are_refused() -> None:
    pipe = PIPES["DiT"].make()
    with pytest.raises(UnsupportedError, match="holds 0 denoisers"):
        sliding_windows(pipe, prompt="a red circle")


def test_a_plan_with_a_loop_of_its_own_is_refused() -> None:
    pipe = pipeline()
    with parallelize(pipe, DualParallel()), pytest.raises(ArgumentError, match="loop of its own"):
        sliding_windows(pipe, window=4, stride=2, **call(29))
