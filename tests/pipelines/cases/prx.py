"""PRX, in latents and in pixels, and the editors of JoyImage."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    JoyImageEditPipeline,
    JoyImageEditPlusPipeline,
    PRXPipeline,
    PRXPixelPipeline,
)

from tests.parallel.image_families_pairs import joy, joy_plus
from tests.parallel.image_families_sequences import prx
from tests.pipelines.case import Case
from tests.pipelines.parts import Absent, coarse, pil_picture, prompts
from tests.tiny_models.autoencoders import kl_autoencoder, wan_autoencoder
from tests.tiny_models.weights import noise, randomized


def _latents() -> Any:
    transformer, vae = randomized(prx(6, in_channels=4)), kl_autoencoder(shift_factor=0.1)
    return PRXPipeline(transformer, FlowMatchEulerDiscreteScheduler(), None, None, vae)


def _pixels() -> Any:
    return PRXPixelPipeline(randomized(prx(6, in_channels=3)), FlowMatchEulerDiscreteScheduler(), None, None)


def _joy(kind: Any, model: Any) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe = kind(scheduler, coarse(wan_autoencoder(base_dim=4)), Absent(), None, randomized(model(6)), None)
    pipe.vae_scale_factor_spatial *= 8
    if kind is JoyImageEditPlusPipeline:
        pipe.encode_prompt_multiple_images = _encoded  # what the language model would answer
    return pipe


def _encoded(prompt: list[str], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [prompt] if isinstance(prompt, str) else prompt
    length = 5 + len(texts[0]) % 3
    return noise(len(texts), length, 12, seed=length), torch.ones(len(texts), length, dtype=torch.int64)


def _call(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.bool)
    keep[-1, 5:] = False
    return prompts(
        samples,
        prompt_attention_mask=keep,
        negative_prompt_attention_mask=keep,
        use_resolution_binning=False,
        guidance_scale=3.0,
    )


def _small(samples: int) -> dict[str, Any]:
    return _call(samples) | {"height": 16, "width": 16, "output_type": "pt"}


def _edited(samples: int) -> dict[str, Any]:
    return prompts(
        samples,
        prompt_embeds_mask=torch.ones(samples, 7, dtype=torch.int64),
        negative_prompt_embeds_mask=torch.ones(samples, 7, dtype=torch.int64),
        guidance_scale=3.0,
    )


def _edited_from_two(samples: int) -> dict[str, Any]:
    named = {name: value for name, value in _edited(samples).items() if "embeds" not in name}
    images = [pil_picture(), pil_picture(48, 48, seed=6)]
    return named | {"prompt": "both", "negative_prompt": "none", "images": images, "height": 384, "width": 640}


HERE = (
    # With guidance, these make a timestep for one sample and its twin only.
    Case(name="PRXPipeline", build=_latents, call=_call, samples=1),
    Case(name="PRXPixelPipeline", build=_pixels, call=_small, samples=1),
    Case(
        name="JoyImageEditPipeline",
        build=lambda: _joy(JoyImageEditPipeline, joy),
        call=lambda samples: _edited(samples) | {"image": pil_picture()},
        samples=1,
    ),
    Case(
        name="JoyImageEditPlusPipeline",
        build=lambda: _joy(JoyImageEditPlusPipeline, joy_plus),
        call=_edited_from_two,
        samples=1,
    ),
)
