"""Wan and what was made from it: VACE, Animate, Lucy Edit and ChronoEdit."""

from __future__ import annotations

from typing import Any

from diffusers import (
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    LucyEditPipeline,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)

from tests.parallel.video_families import wan_like
from tests.pipelines.case import Case
from tests.pipelines.parts import prompts
from tests.pipelines.unet_parts import clip_pictures
from tests.pipelines.video_parts import clip_vision, pictures
from tests.tiny_models.autoencoders import wan_autoencoder
from tests.tiny_models.weights import randomized


def _transformer(kind: Any = WanTransformer3DModel, **changed: Any) -> Any:
    return randomized(wan_like(kind, **changed))


def unipc() -> UniPCMultistepScheduler:
    """The scheduler of Wan."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _pipe(kind: Any, transformer: Any, **more: Any) -> Any:
    parts = {"tokenizer": None, "text_encoder": None, "vae": wan_autoencoder(), "scheduler": unipc()}
    return kind(transformer=transformer, **parts | more)


def _seeing(kind: Any, transformer: Any) -> Any:
    return _pipe(kind, transformer, image_encoder=clip_vision(), image_processor=clip_pictures(16))


def _video(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"num_frames": 9}


def _from_picture(samples: int) -> dict[str, Any]:
    return _video(samples) | {"image": pictures(1)[0]}


def _from_video(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"video": pictures(9), "strength": 0.7, "num_inference_steps": 3}


def _animated(samples: int) -> dict[str, Any]:
    videos = {"image": pictures(1)[0], "pose_video": pictures(5), "face_video": pictures(5)}
    size = {"segment_frame_length": 5, "prev_segment_conditioning_frames": 1, "guidance_scale": 3.0}
    return prompts(samples) | videos | size


SEEING = {"in_channels": 12, "image_dim": 32, "added_kv_proj_dim": 24}


def _animate() -> Any:
    sizes = {"4": 8, "8": 8, "16": 8}
    return _transformer(
        WanAnimateTransformer3DModel,
        in_channels=12,
        latent_channels=4,
        image_dim=32,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes=sizes,
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


HERE = (
    Case(name="WanPipeline", build=lambda: _pipe(WanPipeline, _transformer()), call=_video),
    Case(
        name="WanPipeline + two denoisers",
        build=lambda: _pipe(WanPipeline, _transformer(), transformer_2=_transformer(), boundary_ratio=0.9),
        call=_video,
    ),
    Case(
        name="WanImageToVideoPipeline",
        build=lambda: _seeing(WanImageToVideoPipeline, _transformer(**SEEING)),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="WanImageToVideoPipeline + times per token",
        build=lambda: _pipe(WanImageToVideoPipeline, _transformer(), expand_timesteps=True),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="WanVideoToVideoPipeline", build=lambda: _pipe(WanVideoToVideoPipeline, _transformer()), call=_from_video
    ),
    Case(
        name="WanVACEPipeline",
        build=lambda: _pipe(
            WanVACEPipeline, _transformer(WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=72)
        ),
        call=lambda samples: _video(samples) | {"video": pictures(9)},
        samples=1,
    ),
    Case(
        name="WanAnimatePipeline",
        build=lambda: _seeing(WanAnimatePipeline, _animate()),
        call=_animated,
        samples=1,
    ),
    Case(
        name="LucyEditPipeline",
        build=lambda: _pipe(LucyEditPipeline, _transformer(in_channels=8), vae=wan_autoencoder().float()),
        call=lambda samples: _video(samples) | {"video": pictures(9)},
        samples=1,
    ),
    Case(
        name="ChronoEditPipeline",
        build=lambda: _seeing(ChronoEditPipeline, _transformer(ChronoEditTransformer3DModel, **SEEING)),
        call=_from_picture,
        samples=1,
    ),
)
