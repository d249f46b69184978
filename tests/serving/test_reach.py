"""Checks what is refused beside what real calls of the models do, on both sides of each border."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.parallel import Mesh
from partsong.serving.catalog import picture_model
from partsong.serving.errors import CannotMakeError
from partsong.serving.messages import JobWork
from partsong.serving.ranks.first_step import first_step
from partsong.serving.ranks.forecast import MemoryForecast, forecast_for
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.reach import Asked, Failure, Reach
from partsong.serving.ranks.served_model import ServedModel

USUAL = Asked(height=64, width=96, frames=1, steps=20)


def _model(unit: int = 8, side: int = 512, steps: int = 100, frames: int = 40) -> Reach:
    """A model with some rules, of which only the calls that work are known."""

    def failure(asked: Asked) -> Failure | None:
        sides = asked.height, asked.width
        works = all(each % unit == 0 and unit <= each <= side for each in sides)
        return None if works and asked.steps <= steps and asked.frames <= frames else Failure("it said so")

    return Reach("m", USUAL, 4, failure)


@pytest.mark.parametrize("unit", [4, 8, 16])
def test_a_size_that_is_offered_instead_works_and_is_near(unit: int) -> None:
    drawn, reach = random.Random(unit), _model(unit)
    for _ in range(200):
        asked = USUAL._replace(height=drawn.randrange(1, 1500), width=drawn.randrange(1, 1500))
        fits = max(asked[:2]) <= 512 and asked.height % unit == asked.width % unit == 0
        if fits:
            reach.check(asked)
            continue
        with pytest.raises(CannotMakeError, match=re.escape(f"m cannot make size {asked.size} ('it said so')")) as no:
            reach.check(asked)
        found = re.search(r"(?:size|shape is) (\d+)x(\d+)(?!.*cannot)", str(no.value).partition(": ")[2])
        assert found is not None
        width, height = map(int, found.groups())
        assert no.value.param == "size"
        reach.check(USUAL._replace(height=height, width=width))
        if (longer := max(asked[:2])) > 512 + unit:
            assert max(height, width) == 512
            assert abs(width * asked.height - height * asked.width) <= unit * longer
        elif longer <= 512:
            assert abs(width - asked.width) <= unit
            assert abs(height - asked.height) <= unit


@pytest.mark.parametrize(
    ("asked", "says", "param"),
    [
        (USUAL._replace(steps=101), "num_inference_steps=101 ('it said so'): the nearest that it makes is 100", None),
        (USUAL._replace(steps=900), "it makes 100 at most; ask for num_inference_steps=100", "num_inference_steps"),
        (USUAL._replace(frames=200), "it makes 40 at most; ask for num_frames=40", "num_frames"),
        (USUAL._replace(width=1024, height=512), "the largest of this shape is 512x256; ask for that", "size"),
        (USUAL._replace(width=66), "makes sides in multiples of 8 pixels; ask for size 64x64", "size"),
    ],
)
def test_a_refusal_names_the_field_and_what_works(asked: Asked, says: str, param: str | None) -> None:
    with pytest.raises(CannotMakeError) as refused:
        _model().check(asked)
    assert says in str(refused.value)
    assert refused.value.param == (param or "num_inference_steps")


def test_what_shapes_alone_do_not_decide_is_not_refused() -> None:
    Reach("m", USUAL, 8, lambda asked: None).check(USUAL._replace(height=3, frames=999))


class Loaded:
    """A model of the zoo with its forecast, and a way to make the first call of a job for real."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        settings = picture_model(name, nproc=1, strategies=(), loras={}).settings
        self.model = ServedModel(settings, mesh)
        forecast = forecast_for(settings, self.model, mesh, first_step(self.model))
        assert forecast is not None
        assert forecast.knows_sizes
        self.forecast: MemoryForecast = forecast

    def work(self, num_frames: int | None = None, **arguments: int) -> JobWork:
        given = {**self.model.defaults, **arguments}
        return JobWork(id="a", prompt="a red circle", arguments=given, out=(Path("x"),), num_frames=num_frames)

    def refusal(self, work: JobWork) -> str | None:
        try:
            self.forecast.check(work)
        except CannotMakeError as error:
            return str(error)
        return None

    def runs(self, work: JobWork) -> bool:
        job = PausedJob(self.model, work, decodes=False)
        with closing(job):
            try:
                job.begin()
                with torch.no_grad():
                    self.model.denoiser(**job.arguments)
            except Exception:  # noqa: BLE001 - however it fails
                return False
        return True


@pytest.fixture(scope="module")
def loaded() -> Iterator[Callable[[str], Loaded]]:
    with Mesh() as mesh:
        models: dict[str, Loaded] = {}
        yield lambda name: models.get(name) or models.setdefault(name, Loaded(name, mesh))


@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [
        ("shapes", {"height": 256, "width": 256}, None),
        ("shapes", {"height": 256, "width": 264}, "size 264x256"),
        ("shapes", {"height": 264, "width": 8}, "size 8x264"),
        ("shapes", {"height": 8, "width": 8}, None),
        ("shapes", {"height": 64, "width": 68}, "multiples of 8 pixels; ask for size"),
        ("shapes", {"num_inference_steps": 150}, None),
        ("shapes-unet", {"height": 24, "width": 72}, None),
        ("shapes-unet", {"height": 64, "width": 68}, "multiples of 8 pixels"),
        pytest.param("shapes-unet", {"num_inference_steps": 1000}, None, marks=pytest.mark.full),
        (
            "shapes-unet",
            {"num_inference_steps": 1001},
            "ask for num_inference_steps=1000|nearest that it makes is 1000",
        ),
        ("motion-causal", {"num_frames": 100}, None),  # whole blocks are made, and what is too much is cut off
        ("motion-causal", {"height": 48, "width": 32}, None),
        ("motion-causal", {"height": 40, "width": 32}, "multiples of 16 pixels"),
    ],
)
def test_what_is_refused_is_what_does_not_run(loaded: Any, name: str, asked: dict[str, int], says: str | None) -> None:
    tried = loaded(name)
    work = tried.work(**asked)
    refusal = tried.refusal(work)
    assert tried.runs(work) == (says is None), refusal
    assert refusal is None if says is None else re.search(says, str(refusal)), refusal


def test_a_video_whose_mask_fills_the_memory_is_refused_by_its_true_size(loaded: Any) -> None:
    tried = loaded("motion-causal")
    large, half = tried.work(height=640, width=1280), tried.work(height=320, width=640)
    tokens = 16 * (640 // 16) * (1280 // 16)  # of 31 frames; everybody looks at those of all earlier blocks
    assert tried.forecast.of(large).working > tokens**2
    assert tried.forecast.of(large).working > 12 * tried.forecast.of(half).working  # it grows with the square
    tried.forecast.room = tried.forecast.of(half).total + 1
    tried.forecast.check(half)
    with pytest.raises(
        CannotMakeError, match=r"31 frames of 1280x640 need .* ask for num_frames=\d+ or size \d+x\d+$"
    ) as no:
        tried.forecast.check(large)
    frames = re.search(r"num_frames=(\d+)", str(no.value))
    assert frames is not None
    tried.forecast.check(tried.work(height=640, width=1280, num_frames=int(frames.group(1))))


def test_a_trial_leaves_the_model_and_its_random_numbers_alone(loaded: Any) -> None:
    tried = loaded("shapes")
    before, config, scheduler = torch.get_rng_state(), dict(tried.model.pipe.config), vars(tried.model.pipe.scheduler)
    steps = scheduler.get("num_inference_steps")
    assert tried.refusal(tried.work(height=120, width=72, num_inference_steps=3)) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert dict(tried.model.pipe.config) == config
    assert scheduler.get("num_inference_steps") == steps
    assert next(tried.model.denoiser.parameters()).device.type == "cpu"
    assert not tried.model.denoiser._forward_pre_hooks
