"""HunyuanImage and its refiner, and HiDream."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanImageRefiner,
    FlowMatchEulerDiscreteScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    HunyuanImagePipeline,
    HunyuanImageRefinerPipeline,
    HunyuanImageTransformer2DModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance

from tests.parallel.image_families_pairs import hunyuan_image
from tests.pipelines.case import Case
from tests.pipelines.parts import picture
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized


def _transformer(**changed: Any) -> HunyuanImageTransformer2DModel:
    return randomized(hunyuan_image(6, **{"patch_size": (1, 1)} | changed))


def _image() -> Any:
    vae = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=32,
        scaling_factor=0.5,
    )
    return HunyuanImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval().double(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=_transformer(),
        guider=AdaptiveProjectedMixGuidance(guidance_scale=3.0),
        ocr_guider=None,
    )


def _refiner() -> Any:
    vae = AutoencoderKLHunyuanImageRefiner(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    transformer = _transformer(
        in_channels=16,
        out_channels=8,
        patch_size=(1, 1, 1),
        text_embed_2_dim=None,
        rope_axes_dim=(2, 2, 4),
        guidance_embeds=True,
    )
    return HunyuanImageRefinerPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval().double(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )


def _hidream() -> Any:
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=[12, 10],
        text_emb_dim=14,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 10),
        llama_layers=[0, 1],
        force_inference_output=True,
    )
    encoders = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3", "_4")}
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    vae = kl_autoencoder(shift_factor=0.1)
    pipe = HiDreamImagePipeline(scheduler=scheduler, vae=vae, transformer=randomized(transformer), **encoders)
    pipe.default_sample_size = 8  # it scales every picture to this area
    return pipe


def _prompts(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.int64)
    keep[-1, 5:] = 0
    named: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "height": 24, "width": 40}
    for sign, seed in (("", 1), ("negative_", 2)):
        named |= {
            f"{sign}prompt_embeds": noise(samples, 7, 12, seed=seed),
            f"{sign}prompt_embeds_mask": keep,
            f"{sign}prompt_embeds_2": noise(samples, 4, 10, seed=seed + 2),
            f"{sign}prompt_embeds_mask_2": torch.ones(samples, 4, dtype=torch.int64),
        }
    return named


def _refined(samples: int) -> dict[str, Any]:
    named = {name: value for name, value in _prompts(samples).items() if "_2" not in name and "negative" not in name}
    return named | {"image": picture(samples, 24, 40)}


def _layered(samples: int) -> dict[str, Any]:
    named: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "guidance_scale": 3.0}
    for sign, seed in (("", 1), ("negative_", 2)):
        named |= {
            f"{sign}prompt_embeds_t5": noise(samples, 5, 12, seed=seed),
            f"{sign}prompt_embeds_llama3": noise(2, samples, 4, 10, seed=seed + 2),
            f"{sign}pooled_prompt_embeds" if sign == "" else "negative_pooled_prompt_embeds": noise(
                samples, 14, seed=seed + 4
            ),
        }
    return named | {"height": 48, "width": 80}


HERE = (
    Case(name="HunyuanImagePipeline", build=_image, call=_prompts),
    Case(name="HunyuanImageRefinerPipeline", build=_refiner, call=_refined),
    Case(name="HiDreamImagePipeline", build=_hidream, call=_layered),
)
