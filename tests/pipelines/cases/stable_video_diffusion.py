"""Stable Video Diffusion, from one picture."""

from __future__ import annotations

from typing import Any

from diffusers import EulerDiscreteScheduler, StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import kl_autoencoder
from tests.pipelines.unet_parts import clip_pictures, clip_vision

_WIDTH = 12


def _pipe() -> Any:
    unet = UNetSpatioTemporalConditionModel(
        in_channels=8,
        out_channels=4,
        block_out_channels=(32, 64),  # its norms have 32 groups
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=12,
        layers_per_block=1,
        cross_attention_dim=_WIDTH,
        num_attention_heads=(2, 2),
        num_frames=3,
    )
    return StableVideoDiffusionPipeline(
        vae=kl_autoencoder(),  # type: ignore[arg-type]
        image_encoder=clip_vision(_WIDTH),
        unet=randomized(unet, scale=0.1),
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
