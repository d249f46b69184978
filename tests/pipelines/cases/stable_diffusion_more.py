"""Stable Diffusion with other inputs: adapters, depth, low resolution, the embeddings of images."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionDepth2ImgPipeline,
    StableDiffusionImageVariationPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionLatentUpscalePipeline,
    StableDiffusionUpscalePipeline,
    StableUnCLIPImg2ImgPipeline,
    StableUnCLIPPipeline,
    T2IAdapter,
    UnCLIPScheduler,
)
from diffusers.pipelines.stable_diffusion import StableUnCLIPImageNormalizer
from transformers import CLIPTextModelWithProjection

from tests.pipelines.case import Case
from tests.pipelines.cases.stable_diffusion import SIZE, WIDTH, picture, plain, prompts, unet
from tests.pipelines.unet_parts import clip_text, clip_tokenizer, clip_vision, prior
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

POOLED = 10
#: Numbers that the latent upscaler is told the noise of its picture by.
_NOISE_LEVELS = 128


def unsized(call: Any) -> Any:
    """The same call for a pipeline that takes the sizes from its picture."""
    return lambda samples: {name: value for name, value in call(samples).items() if name not in SIZE}


def _adapted(kind: str = "full_adapter") -> Any:
    adapter = T2IAdapter(adapter_type=kind, channels=[8, 16], num_res_blocks=1, downscale_factor=8)
    return plain(StableDiffusionAdapterPipeline, adapter=randomized(adapter))


def _with_picture(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"image": picture(samples)}


def _with_depth() -> Any:
    return StableDiffusionDepth2ImgPipeline(
        vae=kl_autoencoder(),
        unet=unet(in_channels=5),
        scheduler=DDIMScheduler(clip_sample=False),
        text_encoder=None,
        tokenizer=None,
        depth_estimator=None,
        feature_extractor=None,
    )


def _deep(samples: int) -> dict[str, Any]:
    depth = noise(samples, SIZE["height"], SIZE["width"], seed=6)
    return unsized(_with_picture)(samples) | {"depth_map": depth, "strength": 0.7}


def _varied() -> Any:
    return StableDiffusionImageVariationPipeline(
        vae=kl_autoencoder(),
        image_encoder=clip_vision(WIDTH),
        unet=unet(),
        scheduler=DDIMScheduler(clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _variation(samples: int) -> dict[str, Any]:
    without = {name: value for name, value in prompts(samples).items() if "prompt" not in name}
    return without | {"image": noise(samples, 3, 32, 32, seed=5)}


def _edited(samples: int) -> dict[str, Any]:
    return unsized(_with_picture)(samples) | {"image_guidance_scale": 1.5}


def _doubled() -> Any:
    """Doubles latents: it predicts noise and a variance that the pipeline leaves out."""
    settings: dict[str, Any] = {"in_channels": 8, "out_channels": 5, "time_cond_proj_dim": _NOISE_LEVELS + POOLED}
    return StableDiffusionLatentUpscalePipeline(
        vae=kl_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        unet=unet(**settings),
        scheduler=EulerDiscreteScheduler(),
    )


def _enlarged(samples: int) -> dict[str, Any]:
    embeds = {
        "pooled_prompt_embeds": noise(samples, POOLED, seed=3),
        "negative_pooled_prompt_embeds": noise(samples, POOLED, seed=4),
    }
    small = {"image": noise(samples, 4, 8, 10, seed=5)}
    return unsized(prompts)(samples) | embeds | small


def _upscaled() -> Any:
    return StableDiffusionUpscalePipeline(
        vae=kl_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        unet=unet(in_channels=7, num_class_embeds=50),
        low_res_scheduler=DDPMScheduler(),
        scheduler=DDIMScheduler(clip_sample=False),
        max_noise_level=50,
    )


def _small(samples: int) -> dict[str, Any]:
    return unsized(prompts)(samples) | {"image": noise(samples, 3, 16, 20, seed=5).clamp(-1, 1), "noise_level": 20}


def _of_images(kind: Any, **more: Any) -> Any:
    """A pipeline whose UNet is told the noised embedding of an image."""
    return kind(
        image_normalizer=randomized(StableUnCLIPImageNormalizer(embedding_dim=POOLED), scale=1.0),
        image_noising_scheduler=DDPMScheduler(),
        tokenizer=clip_tokenizer(),
        text_encoder=clip_text(WIDTH),
        unet=unet(class_embed_type="projection", projection_class_embeddings_input_dim=2 * POOLED),
        scheduler=DDIMScheduler(clip_sample=False),
        vae=kl_autoencoder(),
        **more,
    )


def _with_prior() -> Any:
    return _of_images(
        StableUnCLIPPipeline,
        prior_tokenizer=clip_tokenizer(),
        prior_text_encoder=clip_text(POOLED, CLIPTextModelWithProjection),
        prior=prior(POOLED),
        prior_scheduler=UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample"),
    )


def _from_images() -> Any:
    return _of_images(StableUnCLIPImg2ImgPipeline, feature_extractor=None, image_encoder=clip_vision(POOLED))


def _from_words(samples: int) -> dict[str, Any]:
    words = {"prompt": ["a fox"] * samples, "prior_num_inference_steps": 2, "noise_level": 3}
    return {name: value for name, value in prompts(samples).items() if "embeds" not in name} | words


def _from_embedding(samples: int) -> dict[str, Any]:
    embeds: torch.Tensor = noise(samples, POOLED, seed=5)
    return prompts(samples) | {"image_embeds": embeds, "noise_level": 3}


HERE = (
    Case(name="StableDiffusionAdapterPipeline", build=_adapted, call=_with_picture),
    # It makes one residual more than the UNet has levels.
    Case(name="StableDiffusionAdapterPipeline + light", build=lambda: _adapted("light_adapter"), call=_with_picture),
    Case(name="StableDiffusionDepth2ImgPipeline", build=_with_depth, call=_deep),
    Case(name="StableDiffusionImageVariationPipeline", build=_varied, call=_variation),
    Case(
        name="StableDiffusionInstructPix2PixPipeline",
        build=lambda: plain(StableDiffusionInstructPix2PixPipeline, unet(in_channels=8)),
        call=_edited,
    ),
    Case(name="StableDiffusionLatentUpscalePipeline", build=_doubled, call=_enlarged),
    Case(name="StableDiffusionUpscalePipeline", build=_upscaled, call=_small),
    Case(name="StableUnCLIPPipeline", build=_with_prior, call=_from_words),
    Case(
        name="StableUnCLIPImg2ImgPipeline",
        build=lambda: _of_images(
            StableUnCLIPImg2ImgPipeline, feature_extractor=None, image_encoder=clip_vision(POOLED)
        ),
        call=_from_embedding,
    ),
)
