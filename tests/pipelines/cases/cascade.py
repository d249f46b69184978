"""Stable Cascade's two stages: a prior that makes embeddings, and a decoder that makes latents of them."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDPMWuerstchenScheduler,
    StableCascadeCombinedPipeline,
    StableCascadeDecoderPipeline,
    StableCascadePriorPipeline,
)
from diffusers.models import StableCascadeUNet

from tests.pipelines.case import Case
from tests.pipelines.parts import Absent
from tests.tiny_models.weights import noise, randomized

_NO_TEXT = {"tokenizer": None, "text_encoder": Absent()}
_FOUR = {"in_channels": 4, "out_channels": 4}
_LAYERS = {
    "conditioning_dim": 24,
    "block_out_channels": (16, 24),
    "num_attention_heads": (2, 3),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "clip_text_pooled_in_channels": 12,
    "timestep_ratio_embedding_dim": 8,
    "dropout": (0.0, 0.0),
}


def _unet(**more: Any) -> StableCascadeUNet:
    return randomized(StableCascadeUNet(**_LAYERS, **more))


def _prior() -> StableCascadePriorPipeline:
    unet = _unet(
        clip_text_in_channels=12, clip_image_in_channels=10, switch_level=(False,), in_channels=4, out_channels=4
    )
    return StableCascadePriorPipeline(
        **_NO_TEXT, prior=unet, scheduler=DDPMWuerstchenScheduler(), resolution_multiple=16.0
    )


def _decoder() -> StableCascadeDecoderPipeline:
    unet = _unet(in_channels=4, out_channels=4, patch_size=2, effnet_in_channels=4, timestep_conditioning_type=("sca",))
    return StableCascadeDecoderPipeline(
        **_NO_TEXT, decoder=unet, scheduler=DDPMWuerstchenScheduler(), vqgan=None, latent_dim_scale=3.0
    )


def _texts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_embeds_pooled": noise(samples, 1, 12, seed=2),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=3),
        "negative_prompt_embeds_pooled": noise(samples, 1, 12, seed=4),
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
    }


def _embeddings(samples: int) -> dict[str, Any]:
    return _texts(samples) | {"height": 96, "width": 128, "output_type": "pt"}


def _latents(samples: int) -> dict[str, Any]:
    return _texts(samples) | {"image_embeddings": noise(samples, 4, 4, 6, seed=5), "output_type": "latent"}


def _combined() -> StableCascadeCombinedPipeline:
    prior, decoder = _prior(), _decoder()
    return StableCascadeCombinedPipeline(
        **_NO_TEXT,
        decoder=decoder.decoder,
        scheduler=decoder.scheduler,
        vqgan=None,
        prior_prior=prior.prior,
        prior_text_encoder=Absent(),
        prior_tokenizer=None,
        prior_scheduler=prior.scheduler,
    )


def _both(samples: int) -> dict[str, Any]:
    texts = _texts(samples)
    scales = {"prior_guidance_scale": 3.0, "decoder_guidance_scale": texts.pop("guidance_scale")}
    return texts | scales | {"prior_num_inference_steps": 2, "height": 96, "width": 128, "output_type": "latent"}


HERE = (
    Case(name="StableCascadePriorPipeline", build=_prior, call=_embeddings),
    Case(name="StableCascadeCombinedPipeline", build=_combined, call=_both),
    Case(name="StableCascadeDecoderPipeline", build=_decoder, call=_latents),
)
