"""Stable Video Diffusion, from one picture."""

from __future__ import annotations

from typing import Any

from diffusers import EulerDiscreteScheduler, StableVideoDiffusionPipeline

from tests.parallel.video_unets import spatio_temporal
from tests.pipelines.case import Case
from tests.pipelines.unet_parts import clip_pictures, clip_vision
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

_WIDTH = 12


def _pipe() -> Any:
    return StableVideoDiffusionPipeline(
        vae=kl_autoencoder(),  # type: ignore[arg-type]
        image_encoder=clip_vision(_WIDTH),
        unet=randomized(spatio_temporal(in_channels=8), scale=0.1),
        scheduler=EulerDiscreteScheduler(prediction_type="v_prediction"),
        feature_extractor=clip_pictures(),
    )


def _call(samples: int) -> dict[str, Any]:
    return {
        "image": noise(samples, 3, 32, 32, seed=5).sigmoid(),
        "height": 48,
        "width": 48,
        "num_frames": 3,
        "num_inference_steps": 2,
        "output_type": "latent",
    }


HERE = (Case(name="StableVideoDiffusionPipeline", build=_pipe, call=_call),)
