"""Krea 2, Ovis-Image, LongCat-Image, Nucleus-Image and ERNIE-Image, whose prompts come as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    LongCatImageEditPipeline,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    NucleusMoEImagePipeline,
    NucleusMoEImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import Absent, coarse, kl_autoencoder, pil_picture, qwen_autoencoder

_FLUX_LIKE = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 12,
    "axes_dims_rope": (2, 2, 4),
}


def _krea() -> Any:
    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=12,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(2, 2, 4),
    )
    return Krea2Pipeline(_flow(), qwen_autoencoder(), None, None, randomized(transformer))


def _flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler()


def _ovis() -> Any:
    transformer = randomized(OvisImageTransformer2DModel(**_FLUX_LIKE, out_channels=16))
    return OvisImagePipeline(_flow(), kl_autoencoder(shift_factor=0.1), None, None, transformer)


def _longcat(kind: Any) -> Any:
    settings = _FLUX_LIKE | {"in_channels": 64, "pooled_projection_dim": 10}  # the pipelines know 16 channels only
    transformer = randomized(LongCatImageTransformer2DModel(**settings))
    vae = kl_autoencoder(shift_factor=0.1, latent_channels=16)
    pipe = kind(_flow(), vae, Absent(), None, Absent(), transformer)
    if kind is LongCatImageEditPipeline:
        pipe.vae, pipe.vae_scale_factor = coarse(vae), 8 * pipe.vae_scale_factor
    encode = pipe.encode_prompt  # it measures the prompt, also where it gets embeddings
    pipe.encode_prompt = lambda prompt, prompt_embeds, **more: encode(
        prompt=[""] * len(prompt_embeds), prompt_embeds=prompt_embeds, **more
    )
    return pipe


def _nucleus() -> Any:
    transformer = NucleusMoEImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(2, 2, 4),
        mlp_ratio=8.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=8,
        capacity_factors=2.0,
    )
    return NucleusMoEImagePipeline(randomized(transformer), _flow(), qwen_autoencoder(), None, None)


def _ernie() -> Any:
    transformer = ErnieImageTransformer2DModel(
        hidden_size=24,
        num_attention_heads=3,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=12,
        rope_axes_dim=(2, 2, 4),
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(4,) * 4,
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    return ErnieImagePipeline(randomized(transformer), randomized(vae), None, None, _flow())


def _call(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _masked(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.bool)
    keep[-1, 5:] = False
    return _call(samples) | {"prompt_embeds_mask": keep, "negative_prompt_embeds_mask": keep}


def _layers(samples: int) -> dict[str, Any]:
    stacks = {
        "prompt_embeds": noise(samples, 7, 3, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 7, 3, 12, seed=2),
    }
    return _masked(samples) | stacks


def _listed(samples: int) -> dict[str, Any]:
    named = _call(samples)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        named[name] = [text[: 7 - 2 * index] for index, text in enumerate(named[name])]
    return named


def _edited(samples: int) -> dict[str, Any]:
    named = _call(samples) | {"image": pil_picture()}
    return {name: value for name, value in named.items() if name not in ("height", "width")}


HERE = (
    Case(name="Krea2Pipeline", build=_krea, call=_layers),
    Case(name="OvisImagePipeline", build=_ovis, call=lambda samples: _call(samples) | {"negative_prompt": None}),
    Case(
        name="LongCatImagePipeline",
        build=lambda: _longcat(LongCatImagePipeline),
        call=lambda samples: _call(samples) | {"enable_prompt_rewrite": False},
    ),
    Case(name="LongCatImageEditPipeline", build=lambda: _longcat(LongCatImageEditPipeline), call=_edited, samples=1),
    Case(name="NucleusMoEImagePipeline", build=_nucleus, call=_masked),
    Case(name="ErnieImagePipeline", build=_ernie, call=_listed),
)
