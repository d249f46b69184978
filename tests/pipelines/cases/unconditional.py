"""Pipelines around a plain UNet: without conditions, from a class, from a small picture, from a text."""

from __future__ import annotations

from typing import Any

from diffusers import (
    CMStochasticIterativeScheduler,
    ConsistencyModelPipeline,
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    LDMSuperResolutionPipeline,
    LDMTextToImagePipeline,
    UNet2DModel,
)

from tests.pipelines.case import Case
from tests.pipelines.cases import stable_diffusion
from tests.pipelines.cases.kandinsky import movq
from tests.pipelines.cases.stable_diffusion import WIDTH
from tests.pipelines.unet_parts import clip_text, clip_tokenizer
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

_STEPS = {"num_inference_steps": 2, "output_type": "np"}


def unet(**changed: Any) -> UNet2DModel:
    settings: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return randomized(UNet2DModel(**settings | changed))


def _batch(samples: int) -> dict[str, Any]:
    return _STEPS | {"batch_size": samples}


def _of_class(samples: int) -> dict[str, Any]:
    return _batch(samples) | {"class_labels": list(range(samples)), "output_type": "pt"}


def _from_words() -> Any:
    return LDMTextToImagePipeline(
        vqvae=kl_autoencoder(),
        bert=clip_text(WIDTH, length=77),
        tokenizer=clip_tokenizer(77),  # type: ignore[arg-type]
        unet=stable_diffusion.unet(),  # type: ignore[arg-type]
        scheduler=DDIMScheduler(clip_sample=False),
    )


def _words(samples: int) -> dict[str, Any]:
    size = {"height": 64, "width": 80}
    return size | _STEPS | {"prompt": ["a fox", "an owl", "a cat"][:samples], "guidance_scale": 3.0}


def _larger() -> Any:
    return LDMSuperResolutionPipeline(
        vqvae=movq(), unet=unet(in_channels=8, out_channels=4), scheduler=DDIMScheduler(clip_sample=False)
    )


def _small(samples: int) -> dict[str, Any]:
    return _STEPS | {"image": noise(samples, 4, 12, 16, seed=5).clamp(-1, 1)}


HERE = (
    Case(name="DDPMPipeline", build=lambda: DDPMPipeline(unet(), DDPMScheduler()), call=_batch),
    Case(name="DDIMPipeline", build=lambda: DDIMPipeline(unet(), DDIMScheduler()), call=_batch),
    Case(
        name="ConsistencyModelPipeline",
        build=lambda: ConsistencyModelPipeline(unet(num_class_embeds=5), CMStochasticIterativeScheduler()),
        call=_of_class,
    ),
    Case(name="LDMTextToImagePipeline", build=_from_words, call=_words),
    Case(name="LDMSuperResolutionPipeline", build=_larger, call=_small),
)
