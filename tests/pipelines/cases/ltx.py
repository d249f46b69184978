"""LTX-Video: from text, pictures and conditions, long videos, and its upsampler."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXEulerAncestralRFScheduler,
    LTXI2VLongMultiPromptPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
)

from tests.parallel.video_families import ltx
from tests.pipelines.case import Case
from tests.pipelines.video_parts import kept, letters, ltx_autoencoder, pictures, t5_encoder
from tests.tiny_models.weights import noise, randomized

LEFT = {"LTXLatentUpsamplePipeline": "it has no denoiser: one network makes its latents larger in a single call"}


def _pipe(kind: Any, scheduler: Any = None) -> Any:
    return kind(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(),
        vae=ltx_autoencoder(),
        text_encoder=t5_encoder(),
        tokenizer=letters(),
        transformer=randomized(ltx(6, norm_elementwise_affine=False)),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_attention_mask": kept(samples),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_prompt_attention_mask": kept(samples),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 96,
        "width": 160,
        "num_frames": 17,
    }


def _from_picture(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": pictures(1, 96, 160)[0]}


def _long(samples: int) -> dict[str, Any]:
    windows = {"temporal_tile_size": 24, "temporal_overlap": 8, "num_frames": 33, "guidance_scale": 3.0}
    texts = {"prompt": "a cat | a dog", "negative_prompt": "a cow", "max_sequence_length": 16}
    named = {name: value for name, value in _prompts(samples).items() if "prompt" not in name}
    return named | windows | texts


HERE = (
    Case(name="LTXPipeline", build=lambda: _pipe(LTXPipeline), call=_prompts),
    Case(name="LTXImageToVideoPipeline", build=lambda: _pipe(LTXImageToVideoPipeline), call=_from_picture, samples=1),
    Case(name="LTXConditionPipeline", build=lambda: _pipe(LTXConditionPipeline), call=_from_picture, samples=1),
    Case(
        name="LTXI2VLongMultiPromptPipeline",
        build=lambda: _pipe(LTXI2VLongMultiPromptPipeline, LTXEulerAncestralRFScheduler()),
        call=_long,
        samples=1,
    ),
)
