"""Checks adapters that clients ask for by name, against the pipeline with the same adapter."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from partsong import zoo
from partsong.seeds import generators
from tests.serving.running import pixels, running

PROMPT = "a red circle left of a blue square"


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


def test_jobs_with_and_without_an_adapter_share_the_ranks(tmp_path: Path) -> None:
    pipe = _adapted(tmp_path / "other")
    arguments = {**zoo.MODELS["shapes"].defaults, "num_inference_steps": 6}

    def alone(adapted: bool) -> NDArray[np.int16]:
        (pipe.enable_lora if adapted else pipe.disable_lora)()
        with torch.no_grad():
            drawn = pipe([PROMPT], generator=generators(5, 1), output_type="np", **arguments).images[0]
        return np.round(255 * drawn).astype(np.int16)

    expected = {None: alone(False), "other": alone(True)}
    assert np.abs(expected[None] - expected["other"]).max() > 30
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
