"""PRX, in latents and in pixels, and the editors of JoyImage."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    JoyImageEditPipeline,
    JoyImageEditPlusPipeline,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    PRXPipeline,
    PRXPixelPipeline,
    PRXTransformer2DModel,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import Absent, coarse, kl_autoencoder, pil_picture


def _transformer(channels: int) -> PRXTransformer2DModel:
    settings = {"context_in_dim": 12, "hidden_size": 24, "num_heads": 3, "depth": 2, "axes_dim": [4, 4]}
    return randomized(PRXTransformer2DModel(in_channels=channels, patch_size=2, **settings))


def _latents() -> Any:
    return PRXPipeline(_transformer(4), FlowMatchEulerDiscreteScheduler(), None, None, kl_autoencoder(shift_factor=0.1))


def _pixels() -> Any:
    return PRXPixelPipeline(_transformer(3), FlowMatchEulerDiscreteScheduler(), None, None)


def _joy(kind: Any, model: Any) -> Any:
    transformer = model(
        patch_size=[1, 2, 2],
        in_channels=4,
        hidden_size=24,
        num_attention_heads=3,
        text_dim=12,
        mlp_width_ratio=2.0,
        num_layers=2,
        rope_dim_list=[2, 2, 4],
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe = kind(scheduler, coarse(randomized(vae)), Absent(), None, randomized(transformer), None)
    pipe.vae_scale_factor_spatial *= 8
    if kind is JoyImageEditPlusPipeline:
        pipe.encode_prompt_multiple_images = _encoded  # what the language model would answer
    return pipe


def _encoded(prompt: list[str], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [prompt] if isinstance(prompt, str) else prompt
    length = 5 + len(texts[0]) % 3
    return noise(len(texts), length, 12, seed=length), torch.ones(len(texts), length, dtype=torch.int64)


def _call(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.bool)
    keep[-1, 5:] = False
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_attention_mask": keep,
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_prompt_attention_mask": keep,
        "use_resolution_binning": False,
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _small(samples: int) -> dict[str, Any]:
    return _call(samples) | {"height": 16, "width": 16, "output_type": "pt"}


def _edited(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.int64),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.int64),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _edited_from_two(samples: int) -> dict[str, Any]:
    named = {name: value for name, value in _edited(samples).items() if "embeds" not in name}
    images = [pil_picture(), pil_picture(48, 48, seed=6)]
    return named | {"prompt": "both", "negative_prompt": "none", "images": images, "height": 384, "width": 640}


HERE = (
    # With guidance, these make a timestep for one sample and its twin only.
    Case(name="PRXPipeline", build=_latents, call=_call, samples=1),
    Case(name="PRXPixelPipeline", build=_pixels, call=_small, samples=1),
    Case(
        name="JoyImageEditPipeline",
        build=lambda: _joy(JoyImageEditPipeline, JoyImageEditTransformer3DModel),
        call=lambda samples: _edited(samples) | {"image": pil_picture()},
        samples=1,
    ),
    Case(
        name="JoyImageEditPlusPipeline",
        build=lambda: _joy(JoyImageEditPlusPipeline, JoyImageEditPlusTransformer3DModel),
        call=_edited_from_two,
        samples=1,
    ),
)
