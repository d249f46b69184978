"""Pipelines of PixArt, Sana, HunyuanDiT, Lumina, DiT, AuraFlow and Lumina 2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanDiT2DControlNetModel,
    HunyuanDiT2DModel,
    HunyuanDiTControlNetPipeline,
    HunyuanDiTPAGPipeline,
    HunyuanDiTPipeline,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    LuminaPipeline,
    PixArtAlphaPipeline,
    PixArtSigmaPAGPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import kl_autoencoder, picture

_HUNYUAN = {
    "num_attention_heads": 3,
    "attention_head_dim": 32,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 6,
    "hidden_size": 96,
    "cross_attention_dim": 12,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 10,
    "text_len": 5,
    "text_len_t5": 6,
    "use_style_cond_and_image_meta_size": False,
}


def _pixart(kind: Any, **more: Any) -> Any:
    transformer = PixArtTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=6,
        patch_size=2,
        cross_attention_dim=24,
        caption_channels=12,
        use_additional_conditions=False,
    )
    return kind(None, None, kl_autoencoder(), randomized(transformer), DPMSolverMultistepScheduler(), **more)


def _hunyuan(kind: Any, **more: Any) -> Any:
    transformer = randomized(HunyuanDiT2DModel(**_HUNYUAN, num_layers=4))
    return kind(
        vae=kl_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **more,
    )


def _hunyuan_control() -> HunyuanDiT2DControlNetModel:
    settings = {name: value for name, value in _HUNYUAN.items() if name != "num_layers"}
    return randomized(HunyuanDiT2DControlNetModel(**settings, transformer_num_layers=4))


def _lumina() -> Any:
    transformer = LuminaNextDiT2DModel(
        sample_size=6,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        cross_attention_dim=12,
    )
    return LuminaPipeline(randomized(transformer), FlowMatchEulerDiscreteScheduler(), kl_autoencoder(), None, None)


def _lumina2() -> Any:
    transformer = Lumina2Transformer2DModel(
        sample_size=6,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(2, 2, 4),
        axes_lens=(30, 32, 32),
        cap_feat_dim=12,
    )
    vae = kl_autoencoder(shift_factor=0.1)
    return Lumina2Pipeline(randomized(transformer), FlowMatchEulerDiscreteScheduler(), vae, None, None)


def _aura_flow() -> Any:
    transformer = AuraFlowTransformer2DModel(
        sample_size=6,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=12,
        caption_projection_dim=24,
        pos_embed_max_size=256,
    )
    return AuraFlowPipeline(None, None, kl_autoencoder(), randomized(transformer), FlowMatchEulerDiscreteScheduler())


def _dit() -> Any:
    transformer = DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=6,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )
    return DiTPipeline(randomized(transformer), kl_autoencoder(), DDIMScheduler())


def _prompts(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.int64)
    keep[-1, 5:] = 0
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_attention_mask": keep,
        "negative_prompt": None,
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_prompt_attention_mask": keep,
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _unbinned(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"use_resolution_binning": False}


def _two_encoders(samples: int) -> dict[str, Any]:
    named: dict[str, Any] = {"use_resolution_binning": False, "output_type": "latent", "num_inference_steps": 2}
    for sign, seed in (("", 1), ("negative_", 2)):
        named |= {
            f"{sign}prompt_embeds": noise(samples, 5, 12, seed=seed),
            f"{sign}prompt_embeds_2": noise(samples, 6, 16, seed=seed + 2),
            f"{sign}prompt_attention_mask": torch.ones(samples, 5),
            f"{sign}prompt_attention_mask_2": torch.ones(samples, 6),
        }
    return named | {"height": 48, "width": 80, "guidance_scale": 3.0}


def _controlled(samples: int) -> dict[str, Any]:
    return _two_encoders(samples) | {"control_image": picture(samples, seed=6)}


def _classes(samples: int) -> dict[str, Any]:
    return {"class_labels": list(range(samples)), "guidance_scale": 3.0, "num_inference_steps": 2, "output_type": "pt"}


HERE = (
    Case(name="PixArtAlphaPipeline", build=lambda: _pixart(PixArtAlphaPipeline), call=_unbinned),
    Case(name="PixArtSigmaPipeline", build=lambda: _pixart(PixArtSigmaPipeline), call=_unbinned),
    Case(
        name="PixArtSigmaPAGPipeline",
        build=lambda: _pixart(PixArtSigmaPAGPipeline, pag_applied_layers=["blocks.1"]),
        call=_unbinned,
    ),
    Case(name="HunyuanDiTPipeline", build=lambda: _hunyuan(HunyuanDiTPipeline), call=_two_encoders),
    Case(
        name="HunyuanDiTPAGPipeline",
        build=lambda: _hunyuan(HunyuanDiTPAGPipeline, pag_applied_layers=["blocks.1"]),
        call=_two_encoders,
    ),
    Case(
        name="HunyuanDiTControlNetPipeline",
        build=lambda: _hunyuan(HunyuanDiTControlNetPipeline, controlnet=_hunyuan_control()),
        call=_controlled,
    ),
    # It turns queries and keys by complex numbers of float32.
    Case(name="LuminaPipeline", build=_lumina, call=_prompts, tolerance=1e-4),
    Case(name="Lumina2Pipeline", build=_lumina2, call=_prompts),
    Case(name="AuraFlowPipeline", build=_aura_flow, call=_prompts),
    Case(name="DiTPipeline", build=_dit, call=_classes),
)
