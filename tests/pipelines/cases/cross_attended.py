"""Pipelines of PixArt, Sana, HunyuanDiT, Lumina, DiT, AuraFlow and Lumina 2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    DDIMScheduler,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanDiT2DControlNetModel,
    HunyuanDiTControlNetPipeline,
    HunyuanDiTPAGPipeline,
    HunyuanDiTPipeline,
    Lumina2Pipeline,
    LuminaNextDiT2DModel,
    LuminaPipeline,
    PixArtAlphaPipeline,
    PixArtSigmaPAGPipeline,
    PixArtSigmaPipeline,
)

from tests.parallel.families import dit, pixart
from tests.parallel.image_families import aura_flow, hunyuan_dit, lumina2
from tests.pipelines.case import Case
from tests.pipelines.parts import picture, prompts
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized


def _pixart(kind: Any, **more: Any) -> Any:
    return kind(None, None, kl_autoencoder(), randomized(pixart(6)), DPMSolverMultistepScheduler(), **more)


def _hunyuan(kind: Any, **more: Any) -> Any:
    return kind(
        vae=kl_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        transformer=randomized(hunyuan_dit(6)),
        scheduler=DPMSolverMultistepScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **more,
    )


def _hunyuan_control() -> HunyuanDiT2DControlNetModel:
    return randomized(hunyuan_dit(6, HunyuanDiT2DControlNetModel, transformer_num_layers=4))


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
    vae = kl_autoencoder(shift_factor=0.1)
    return Lumina2Pipeline(randomized(lumina2(6)), FlowMatchEulerDiscreteScheduler(), vae, None, None)


def _aura_flow() -> Any:
    transformer = randomized(aura_flow(6, num_single_dit_layers=1))
    return AuraFlowPipeline(None, None, kl_autoencoder(), transformer, FlowMatchEulerDiscreteScheduler())


def _dit() -> Any:
    transformer = randomized(dit(6, out_channels=8, num_embeds_ada_norm=1000))
    return DiTPipeline(transformer, kl_autoencoder(), DDIMScheduler())


def _prompts(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.int64)
    keep[-1, 5:] = 0
    return prompts(
        samples,
        prompt_attention_mask=keep,
        negative_prompt=None,
        negative_prompt_attention_mask=keep,
        guidance_scale=3.0,
    )


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
