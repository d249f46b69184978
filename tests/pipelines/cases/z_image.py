"""Z-Image: from text, from images, with ControlNets, and with pictures in the text."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    ZImageControlNetInpaintPipeline,
    ZImageControlNetModel,
    ZImageControlNetPipeline,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
    ZImageOmniPipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

from tests.parallel.image_families import z_image
from tests.pipelines.case import Case
from tests.pipelines.parts import half_mask, picture, pil_picture
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized


def _transformer(**changed: Any) -> ZImageTransformer2DModel:
    return randomized(z_image(6, axes_lens=[256, 64, 64], **changed))


def _control(channels: int = 4) -> ZImageControlNetModel:
    return randomized(
        ZImageControlNetModel(
            control_layers_places=[0],
            control_refiner_layers_places=[0],  # of two: it adds to the picture between them
            control_in_dim=channels,
            dim=24,
            n_refiner_layers=2,
            n_heads=3,
            n_kv_heads=3,
        )
    )


def _pipe(kind: Any, transformer: Any = None, **more: Any) -> Any:
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=kl_autoencoder(shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer or _transformer(),
        **more,
    )


def _omni() -> Any:
    pipe = _pipe(ZImageOmniPipeline, _transformer(siglip_feat_dim=10), siglip=None, siglip_processor=None)
    pipe.vae.to(torch.bfloat16)  # the pipeline encodes pictures in that type
    # What the vision model would answer: one grid of features for each picture, in every sample.
    pipe.prepare_siglip_embeds = lambda images, batch_size, device, dtype: [
        [noise(3, 5, 10, seed=7) for _ in images] for _ in range(batch_size)
    ]
    return pipe


def _with_picture(samples: int) -> dict[str, Any]:
    named = _prompts(samples) | {"image": [pil_picture(80, 64)]}
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        named[name] = [[text[:3], text[3:], text[:2]] for text in named[name]]
    return named


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": [noise(5 + 35 * index, 12, seed=1 + index) for index in range(samples)],
        "negative_prompt_embeds": [noise(5, 12, seed=4 + index) for index in range(samples)],
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _from_image(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": picture(samples), "strength": 0.7, "num_inference_steps": 3}


def _painted(samples: int) -> dict[str, Any]:
    return _from_image(samples) | {"mask_image": half_mask(samples)}


def _controlled(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"control_image": picture(1, seed=6)}


def _control_painted(samples: int) -> dict[str, Any]:
    return _controlled(samples) | {"image": picture(samples), "mask_image": half_mask(samples)}


HERE = (
    Case(name="ZImagePipeline", build=lambda: _pipe(ZImagePipeline), call=_prompts),
    Case(name="ZImageImg2ImgPipeline", build=lambda: _pipe(ZImageImg2ImgPipeline), call=_from_image),
    Case(name="ZImageInpaintPipeline", build=lambda: _pipe(ZImageInpaintPipeline), call=_painted),
    Case(
        name="ZImageControlNetPipeline",
        build=lambda: _pipe(ZImageControlNetPipeline, _transformer(n_refiner_layers=2), controlnet=_control()),
        call=_controlled,
    ),
    Case(
        name="ZImageControlNetInpaintPipeline",
        build=lambda: _pipe(ZImageControlNetInpaintPipeline, _transformer(n_refiner_layers=2), controlnet=_control(9)),
        call=_control_painted,
    ),
    Case(
        name="ZImageOmniPipeline",
        build=_omni,
        call=_with_picture,
    ),
)
