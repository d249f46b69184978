"""Checks adapters that clients ask for by name, against the pipeline with the same adapter."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

from partsong import zoo
from partsong.parallel import Mesh
from partsong.seeds import generators
from partsong.serving.catalog import picture_model
from partsong.serving.messages import JobWork
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.served_model import ServedModel
from tests.serving.running import pixels, running

PROMPT = "a red circle left of a blue square"
ARGUMENTS = {**zoo.MODELS["shapes"].defaults, "num_inference_steps": 6}


def _adapted(folder: Path) -> Any:
    """Returns the pipeline with an adapter that changes what it draws, and saves that adapter."""
    pipe = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    # A saved adapter has no scale of its own, so this one has none either.
    pipe.transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if "lora" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    layers = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(folder, transformer_lora_layers=layers)
    return pipe


def _expected(folder: Path) -> dict[str | None, NDArray[np.int16]]:
    """Returns what the pipeline draws by the adapter's name, and saves that adapter in a folder."""
    pipe, drawn = _adapted(folder), {}
    for name, switch in ((None, pipe.disable_lora), ("other", pipe.enable_lora)):
        switch()
        with torch.no_grad():
            picture = pipe([PROMPT], generator=generators(5, 1), output_type="np", **ARGUMENTS).images[0]
        drawn[name] = np.round(255 * picture).astype(np.int16)
    assert np.abs(drawn[None] - drawn["other"]).max() > 30
    return drawn


def test_jobs_with_and_without_an_adapter_take_turns(tmp_path: Path) -> None:
    expected = _expected(tmp_path / "other")
    loras = {"other": tmp_path / "other"}
    with Mesh() as mesh, torch.no_grad():
        model = ServedModel(picture_model("shapes", nproc=1, strategies=(), loras=loras).settings, mesh)
        jobs = []
        for lora in expected:
            work = JobWork(
                id="a", prompt=PROMPT, arguments=ARGUMENTS, seed=5, lora=lora, out=(tmp_path / f"{lora}.png",)
            )
            jobs.append(PausedJob(model, work, decodes=True))
            jobs[-1].begin()
        while not all(job.is_done for job in jobs):
            for job in jobs:
                model.switch(((), job.work.lora))
                job.answer(model.denoiser(**job.arguments))
    for lora, picture in expected.items():
        with Image.open(tmp_path / f"{lora}.png") as drawn:
            assert np.abs(np.asarray(drawn.convert("RGB"), dtype=np.int16) - picture).max() <= 1, lora


@pytest.mark.full
def test_jobs_with_and_without_an_adapter_share_the_ranks(tmp_path: Path) -> None:
    expected = _expected(tmp_path / "other")
    adapter = f"other={tmp_path / 'other'}"
    with running(tmp_path / "served", "--model", "shapes", "--nproc", "2", "--lora", adapter) as server:

        def draw(asked: tuple[str | None, str]) -> NDArray[np.int16]:
            body = {"seed": 5, "num_inference_steps": 6, "lora": asked[0], "strategy": asked[1]}
            reply = server.client().images.generate(model="shapes", prompt=PROMPT, extra_body=body)
            assert reply.data is not None
            return pixels(str(reply.data[0].b64_json))

        strategies = ("ulysses", "tensor-parallel", "serial")
        everyone = [(lora, strategy) for lora in (None, "other") for strategy in strategies]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for (lora, strategy), picture in zip(everyone, pool.map(draw, everyone), strict=True):
                assert np.abs(picture - expected[lora]).max() <= 1, (lora, strategy)
