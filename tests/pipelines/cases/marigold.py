"""Marigold, which says depth, normals and materials of pictures."""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler, MarigoldDepthPipeline, MarigoldIntrinsicsPipeline, MarigoldNormalsPipeline

from tests.pipelines.case import Case
from tests.pipelines.cases.stable_diffusion import WIDTH, unet
from tests.pipelines.unet_parts import clip_text, clip_tokenizer
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise

_TARGETS = ("albedo", "roughness")


def _pipe(kind: Any, targets: int = 1, **more: Any) -> Any:
    return kind(
        unet=unet(in_channels=4 + 4 * targets, out_channels=4 * targets),
        vae=kl_autoencoder(),
        scheduler=DDIMScheduler(clip_sample=False),
        text_encoder=clip_text(WIDTH),
        tokenizer=clip_tokenizer(),
        default_processing_resolution=0,
        **more,
    )


def _intrinsics() -> Any:
    properties = {"target_names": list(_TARGETS)} | {
        name: {"prediction_space": "srgb", "sub_target_names": ["red", "green", "blue"], "up_to_scale": False}
        for name in _TARGETS
    }
    kind = {"prediction_type": "intrinsics", "target_properties": properties, "default_denoising_steps": 2}
    return _pipe(MarigoldIntrinsicsPipeline, len(_TARGETS), **kind)


def _call(samples: int) -> dict[str, Any]:
    return {
        "image": noise(samples, 3, 64, 80, seed=5).sigmoid(),
        "num_inference_steps": 2,
        "batch_size": samples,
        "output_type": "pt",
    }


HERE = (
    Case(name="MarigoldDepthPipeline", build=lambda: _pipe(MarigoldDepthPipeline), call=_call),
    Case(
        name="MarigoldNormalsPipeline", build=lambda: _pipe(MarigoldNormalsPipeline, use_full_z_range=True), call=_call
    ),
    Case(name="MarigoldIntrinsicsPipeline", build=_intrinsics, call=_call),
)
