"""Stable Diffusion 3, with ControlNets and with perturbed attention guidance."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3ControlNetModel,
    StableDiffusion3ControlNetInpaintingPipeline,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGImg2ImgPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusion3Pipeline,
)

from tests.parallel.families import sd3
from tests.pipelines.case import Case
from tests.pipelines.parts import half_mask, picture, prompts
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

#: Text and picture in two blocks that are alike.
_SIZES = {"num_layers": 2, "dual_attention_layers": (), "qk_norm": None}


def _pipe(kind: Any, *, channels: int = 4, **more: Any) -> Any:
    encoders = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")}
    return kind(
        transformer=randomized(sd3(6, in_channels=channels, out_channels=channels, **_SIZES)),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=kl_autoencoder(shift_factor=0.1, latent_channels=channels),
        **encoders,
        **more,
    )


def _control(**changed: Any) -> SD3ControlNetModel:
    return randomized(sd3(6, SD3ControlNetModel, **_SIZES | changed))


def _prompts(samples: int) -> dict[str, Any]:
    return prompts(
        samples,
        pooled_prompt_embeds=noise(samples, 10, seed=3),
        negative_pooled_prompt_embeds=noise(samples, 10, seed=4),
        guidance_scale=3.0,
    )


def _from_image(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": picture(samples), "strength": 0.7, "num_inference_steps": 3}


def _painted(samples: int) -> dict[str, Any]:
    return _from_image(samples) | {"mask_image": half_mask(samples)}


def _controlled(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"control_image": picture(samples, seed=6), "controlnet_conditioning_scale": 0.8}


_MASKED = dict.fromkeys(
    (
        *("Ulysses", "LatentParallel", "Ring", "SyncPatch", "DisplacedPatch", "PartialPatch", "TokenRing", "Usp"),
        "LayerPipeline",
    ),
    "masks every pair of picture",
)

HERE = (
    Case(name="StableDiffusion3Pipeline", build=lambda: _pipe(StableDiffusion3Pipeline), call=_prompts),
    Case(
        name="StableDiffusion3Img2ImgPipeline", build=lambda: _pipe(StableDiffusion3Img2ImgPipeline), call=_from_image
    ),
    Case(
        name="StableDiffusion3InpaintPipeline",
        build=lambda: _pipe(StableDiffusion3InpaintPipeline, channels=16),
        call=_painted,
    ),
    Case(
        name="StableDiffusion3ControlNetPipeline",
        build=lambda: _pipe(StableDiffusion3ControlNetPipeline, controlnet=_control()),
        call=_controlled,
    ),
    Case(
        name="StableDiffusion3ControlNetInpaintingPipeline",
        build=lambda: _pipe(
            StableDiffusion3ControlNetInpaintingPipeline, controlnet=_control(extra_conditioning_channels=1)
        ),
        call=lambda samples: _controlled(samples) | {"control_mask": half_mask(samples)},
    ),
    Case(
        name="StableDiffusion3PAGPipeline",
        refused=_MASKED,
        build=lambda: _pipe(StableDiffusion3PAGPipeline, pag_applied_layers=["blocks.1"]),
        call=_prompts,
    ),
    Case(
        name="StableDiffusion3PAGImg2ImgPipeline",
        refused=_MASKED,
        build=lambda: _pipe(StableDiffusion3PAGImg2ImgPipeline, pag_applied_layers=["blocks.1"]),
        call=_from_image,
    ),
)
