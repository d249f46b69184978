"""Kandinsky 3, with a UNet of its own."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler, Kandinsky3Img2ImgPipeline, Kandinsky3Pipeline, Kandinsky3UNet

from tests.pipelines.case import Case
from tests.pipelines.cases.kandinsky import SIDE, movq
from tests.pipelines.unet_parts import photo
from tests.tiny_models.weights import noise, randomized

_TEXT = 12


def _pipe(kind: Any) -> Any:
    unet = Kandinsky3UNet(
        time_embedding_dim=16,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(8, 16, 32, 64),
        cross_attention_dim=8,
        encoder_hid_dim=_TEXT,
    )
    return kind(tokenizer=None, text_encoder=None, unet=randomized(unet), scheduler=DDPMScheduler(), movq=movq())


def _prompts(samples: int) -> dict[str, Any]:
    present = torch.ones(samples, 5, dtype=torch.long)
    present[:, 4] = 0
    return {
        "prompt_embeds": noise(samples, 5, _TEXT, seed=1),
        "negative_prompt_embeds": noise(samples, 5, _TEXT, seed=2),
        "attention_mask": present,
        "negative_attention_mask": present.clone(),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
    }


def _from_text(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"height": SIDE, "width": SIDE}


def _from_picture(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": [photo(SIDE)] * samples, "strength": 0.7, "num_inference_steps": 3}


HERE = (
    Case(name="Kandinsky3Pipeline", build=lambda: _pipe(Kandinsky3Pipeline), call=_from_text),
    Case(name="Kandinsky3Img2ImgPipeline", build=lambda: _pipe(Kandinsky3Img2ImgPipeline), call=_from_picture),
)
