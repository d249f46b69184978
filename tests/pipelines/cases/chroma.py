"""Chroma, from text and from images."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ChromaImg2ImgPipeline,
    ChromaInpaintPipeline,
    ChromaPipeline,
    FlowMatchEulerDiscreteScheduler,
)

from tests.parallel.image_families_pairs import chroma
from tests.pipelines.case import Case
from tests.pipelines.parts import half_mask, picture, prompts
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import randomized


def _pipe(kind: Any) -> Any:
    transformer = chroma(6, in_channels=16)
    transformer.register_to_config(guidance_embeds=False)  # the inpainting pipeline asks for it
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=kl_autoencoder(shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        transformer=randomized(transformer),
    )


def _prompts(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.float64)
    keep[-1, 5:] = 0
    return prompts(
        samples, prompt_attention_mask=keep, negative_prompt_attention_mask=keep.roll(1, 0), guidance_scale=3.0
    )


def _from_image(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": picture(samples), "strength": 0.7, "num_inference_steps": 3}


def _painted(samples: int) -> dict[str, Any]:
    return _from_image(samples) | {"mask_image": half_mask(samples), "true_cfg_scale": 3.0}


HERE = (
    Case(name="ChromaPipeline", build=lambda: _pipe(ChromaPipeline), call=_prompts),
    Case(name="ChromaImg2ImgPipeline", build=lambda: _pipe(ChromaImg2ImgPipeline), call=_from_image),
    Case(name="ChromaInpaintPipeline", build=lambda: _pipe(ChromaInpaintPipeline), call=_painted),
)
