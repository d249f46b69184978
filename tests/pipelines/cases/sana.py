"""Sana and its relatives."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaControlNetModel,
    SanaControlNetPipeline,
    SanaPAGPipeline,
    SanaPipeline,
    SanaSprintImg2ImgPipeline,
    SanaSprintPipeline,
    SanaWMPipeline,
    SanaWMTransformer3DModel,
    SCMScheduler,
)

from tests.parallel.image_families import sana, sana_like
from tests.pipelines.case import Case
from tests.pipelines.parts import picture
from tests.pipelines.video_parts import kept, ltx2_autoencoder, pictures
from tests.tiny_models.weights import noise, randomized


def _autoencoder() -> AutoencoderDC:
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "block_types": ("ResBlock", "ResBlock", "ResBlock", "ResBlock"),
            "block_out_channels": (4, 4, 4, 4),
            "qkv_multiscales": ((), (), (), ()),
            "layers_per_block": (1, 1, 1, 1),
        }.items()
    }
    return randomized(
        AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.4,
            **sizes,
        )
    )


def _control() -> SanaControlNetModel:
    return randomized(sana_like(SanaControlNetModel, 6, num_layers=1))


def _pipe(kind: Any, *, sprint: bool = False, **more: Any) -> Any:
    sizes = {"guidance_embeds": True} if sprint else {}
    return kind(
        tokenizer=None,
        text_encoder=None,
        vae=_autoencoder(),
        transformer=randomized(sana(6, **sizes)),
        scheduler=SCMScheduler() if sprint else DPMSolverMultistepScheduler(),
        **more,
    )


def _prompts(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.int64)
    keep[-1, 5:] = 0
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_attention_mask": keep,
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "use_resolution_binning": False,
        "height": 64,
        "width": 32,
    }


def _guided(samples: int) -> dict[str, Any]:
    keep = _prompts(samples)["prompt_attention_mask"]
    unwanted = {"negative_prompt": None, "negative_prompt_embeds": noise(samples, 7, 12, seed=2)}
    return _prompts(samples) | unwanted | {"negative_prompt_attention_mask": keep}


def _world() -> SanaWMPipeline:
    transformer = SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        softmax_every_n=2,
        linear_head_dim=8,
        chunk_plucker_post_attn_blocks=2,
        caption_channels=12,
    )
    return SanaWMPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=ltx2_autoencoder(),
        transformer=randomized(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _walk(samples: int) -> dict[str, Any]:
    """Three frames of latents, seen by a camera that goes forward and turns."""
    return {
        "prompt": "",
        "prompt_embeds": noise(samples, 1, 7, 12, seed=1),
        "prompt_attention_mask": kept(samples),
        "negative_prompt_embeds": noise(samples, 1, 7, 12, seed=2),
        "negative_prompt_attention_mask": kept(samples, present=3),
        "image": pictures(1, 96, 160)[0],
        "action": "w-8,jw-8",
        "intrinsics": [80.0, 80.0, 80.0, 48.0],
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 96,
        "width": 160,
        "num_frames": 17,
    }


HERE = (
    Case(name="SanaPipeline", build=lambda: _pipe(SanaPipeline), call=_guided),
    # Perturbed linear attention is computed in float32.
    Case(
        name="SanaPAGPipeline",
        build=lambda: _pipe(SanaPAGPipeline),
        call=_guided,
        tolerance=1e-4,
    ),
    Case(
        name="SanaControlNetPipeline",
        build=lambda: _pipe(SanaControlNetPipeline, controlnet=_control()),
        call=lambda samples: _guided(samples) | {"control_image": picture(samples, 64, 32)},
    ),
    Case(name="SanaSprintPipeline", build=lambda: _pipe(SanaSprintPipeline, sprint=True), call=_prompts),
    Case(
        name="SanaSprintImg2ImgPipeline",
        build=lambda: _pipe(SanaSprintImg2ImgPipeline, sprint=True),
        call=lambda samples: _prompts(samples) | {"image": picture(samples, 64, 32), "strength": 0.7},
    ),
    # Its camera and its recurrence over frames are computed in float32.
    Case(name="SanaWMPipeline", build=_world, call=_walk, samples=1, tolerance=1e-4),
)
