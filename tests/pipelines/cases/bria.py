"""Bria and its FIBO models."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    BriaFiboEditPipeline,
    BriaFiboPipeline,
    BriaFiboTransformer2DModel,
    BriaPipeline,
    BriaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import Absent, kl_autoencoder, pil_picture

_FLUX_LIKE = {
    "patch_size": 1,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "axes_dims_rope": (0, 4, 4),
}


def _bria() -> Any:
    transformer = randomized(BriaTransformer2DModel(**_FLUX_LIKE, in_channels=16, joint_attention_dim=12))
    return BriaPipeline(transformer, FlowMatchEulerDiscreteScheduler(), kl_autoencoder(shift_factor=0.1), None, None)


def _fibo(kind: Any) -> Any:
    transformer = BriaFiboTransformer2DModel(**_FLUX_LIKE, in_channels=4, joint_attention_dim=24, text_encoder_dim=12)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = kind(randomized(transformer), scheduler, randomized(vae), Absent(), None)
    pipe.get_prompt_embeds = _encoded  # what the language model would answer
    return pipe


def _encoded(prompt: Any, **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    texts = [prompt] if isinstance(prompt, str) else prompt
    length = max(1, *map(len, texts), 1)
    states = [noise(len(texts), length, 12, seed=length + layer) for layer in range(3)]
    keep = torch.tensor([[float(place < max(1, len(text))) for place in range(length)] for text in texts]).double()
    return torch.cat(states[-2:], dim=-1), tuple(states), keep


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


def _spoken(samples: int) -> dict[str, Any]:
    named = {name: value for name, value in _call(samples).items() if "prompt" not in name}
    return named | {"prompt": ["a short one", "long"][:samples], "negative_prompt": ["none"] * samples}


def _edited(samples: int) -> dict[str, Any]:
    prompt = {"prompt": '{"edit_instruction": "a"}', "negative_prompt": "none", "_auto_resize": False}
    return _spoken(samples) | prompt | {"image": pil_picture()}


HERE = (
    Case(name="BriaPipeline", build=_bria, call=_call),
    Case(name="BriaFiboPipeline", build=lambda: _fibo(BriaFiboPipeline), call=_spoken),
    Case(name="BriaFiboEditPipeline", build=lambda: _fibo(BriaFiboEditPipeline), call=_edited, samples=1),
)
