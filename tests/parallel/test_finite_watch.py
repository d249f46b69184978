"""A NaN on the way to a picture is named once, with the step it came up at; no command writes the black picture."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from partsong import CfgParallel, StepCache, parallelize
from partsong.errors import NotANumberError
from partsong.jobs.compare import finite
from partsong.parallel.hooks.finite_watch import FiniteWatch
from tests.pipelines.cases import CASES

PIPELINES = ("StableDiffusionPipeline", "StableDiffusion3Pipeline", "WanPipeline")


def said(caplog: Any) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message.split(",")[0] for message in messages if message.startswith("NaN or infinite numbers came up")]


def call(name: str, pipe: Any, **more: Any) -> Any:
    case = CASES[name]
    with torch.no_grad():
        return pipe(**{"generator": torch.Generator().manual_seed(9), **case.call(case.samples), **more})


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_step_is_named_once(name: str, value: float, caplog: Any) -> None:
    pipe = CASES[name].make()

    def spoil(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {"latents": given["latents"].index_fill(0, torch.tensor([0]), value)} if step == 0 else {}

    with parallelize(pipe, CfgParallel()), caplog.at_level(logging.WARNING):
        call(name, pipe, num_inference_steps=3)
        assert said(caplog) == []
        call(name, pipe, num_inference_steps=3, callback_on_step_end=spoil, output_type="latent")
        assert said(caplog) == ["NaN or infinite numbers came up at step 2 of 3"]
        call(name, pipe, num_inference_steps=3)
        assert len(said(caplog)) == 1


@pytest.mark.parametrize("strategy", [CfgParallel(), StepCache(threshold=0.1)], ids=lambda s: type(s).__name__)
def test_a_decoder_that_overflows_is_named(strategy: Any, caplog: Any) -> None:
    name = "StableDiffusion3Pipeline"
    pipe = CASES[name].make()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias[0] = torch.inf
    with parallelize(pipe, strategy), caplog.at_level(logging.WARNING):
        call(name, pipe, output_type="pt")
    assert said(caplog) == ["NaN or infinite numbers came up in the decoder"]
    assert not pipe.vae.decoder._forward_hooks


def test_what_it_looks_at(caplog: Any) -> None:
    bad = torch.tensor([1.0, torch.nan])
    watch = FiniteWatch()
    with caplog.at_level(logging.WARNING):
        for nothing in (None, (), {}, torch.empty(0), torch.ones(2, dtype=torch.int64), torch.empty(2, device="meta")):
            watch.look(nothing, "nowhere")
        watch.look(torch.full((2,), 65504.0, dtype=torch.float16), "nowhere")
        watch.look((torch.full((2,), 1e300, dtype=torch.float64), bad), "nowhere")
        watch.report()
        assert said(caplog) == []
        for result, place in (((bad,), "in a tuple"), ({"sample": bad}, "in an output"), (-bad / 0, "as infinity")):
            watch.look(torch.ones(1), "before")
            watch.look(result, place)
            watch.look(bad, "after")
            watch.report()
            watch.report()
            assert said(caplog)[-1].endswith(f"came up {place}")
        assert len(said(caplog)) == 3


def test_pictures_that_show_nothing_are_not_written() -> None:
    images = np.zeros((3, 2, 2, 3), np.float32)
    assert finite(images) is images
    images[1, 0] = np.nan
    with pytest.raises(NotANumberError, match="50% of image 1 is NaN"):
        finite(images)
