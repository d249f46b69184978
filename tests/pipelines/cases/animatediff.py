"""AnimateDiff: Stable Diffusion's UNets with motion modules between their blocks."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AnimateDiffControlNetPipeline,
    AnimateDiffPAGPipeline,
    AnimateDiffPipeline,
    AnimateDiffSDXLPipeline,
    AnimateDiffSparseControlNetPipeline,
    AnimateDiffVideoToVideoControlNetPipeline,
    AnimateDiffVideoToVideoPipeline,
    DDIMScheduler,
    MotionAdapter,
    SparseControlNetModel,
    UNetMotionModel,
)
from PIL import Image

from tests.pipelines.case import Case
from tests.pipelines.cases import stable_diffusion, stable_diffusion_xl
from tests.pipelines.cases.stable_diffusion import WIDTH, control
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

FRAMES, SIDE = 3, 48


def _motion(unet: Any = None) -> UNetMotionModel:
    adapter = MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_mid_block_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
        motion_max_seq_length=8,
    )
    return randomized(UNetMotionModel.from_unet2d(stable_diffusion.unet() if unet is None else unet, adapter))


def _pipe(kind: Any, model: Any = None, texts: tuple[str, ...] = ("text_encoder", "tokenizer"), **more: Any) -> Any:
    return kind(
        vae=kl_autoencoder(),
        unet=_motion() if model is None else model,
        motion_adapter=None,
        scheduler=DDIMScheduler(clip_sample=False),
        **dict.fromkeys(texts),
        **more,
    )


def _larger() -> Any:
    texts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return _pipe(AnimateDiffSDXLPipeline, _motion(stable_diffusion_xl.unet()), texts)


def _sparse() -> Any:
    controlnet = SparseControlNetModel(
        conditioning_channels=3,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        num_attention_heads=4,
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
        conditioning_embedding_out_channels=(4, 4, 4, 8),
        use_simplified_condition_embedding=False,
    )
    return _pipe(AnimateDiffSparseControlNetPipeline, controlnet=randomized(controlnet))


def _video(frames: int = FRAMES) -> list[Image.Image]:
    values = noise(frames, SIDE, SIDE, 3, seed=5).sigmoid().mul(255).byte().numpy()
    return [Image.fromarray(frame) for frame in values]


def _prompts(samples: int) -> dict[str, Any]:
    size = {"height": SIDE, "width": SIDE, "num_frames": FRAMES, "num_inference_steps": 2}
    return stable_diffusion.prompts(samples) | size


def _larger_prompts(samples: int) -> dict[str, Any]:
    return stable_diffusion_xl.pooled(_prompts)(samples)


def _controlled(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"conditioning_frames": _video()}


def _keyframes(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"conditioning_frames": _video(2), "controlnet_frame_indices": [0, 2]}


def _from_video(samples: int) -> dict[str, Any]:
    """One video at a time; the pipeline makes several of it where it is asked to."""
    named = _prompts(1) | {"video": _video(), "strength": 0.7, "num_videos_per_prompt": samples}
    return {name: value for name, value in named.items() if name != "num_frames"} | {"num_inference_steps": 3}


def _from_controlled_video(samples: int) -> dict[str, Any]:
    return _from_video(samples) | {"conditioning_frames": _video()}


_PERTURBED = {"pag_applied_layers": "mid_block.*attn1"}

HERE = (
    Case(name="AnimateDiffPipeline", build=lambda: _pipe(AnimateDiffPipeline), call=_prompts),
    Case(
        name="AnimateDiffControlNetPipeline",
        build=lambda: _pipe(AnimateDiffControlNetPipeline, controlnet=control()),
        call=_controlled,
        samples=1,
    ),
    Case(name="AnimateDiffPAGPipeline", build=lambda: _pipe(AnimateDiffPAGPipeline, **_PERTURBED), call=_prompts),
    Case(name="AnimateDiffSDXLPipeline", build=_larger, call=_larger_prompts),
    Case(name="AnimateDiffSparseControlNetPipeline", build=_sparse, call=_keyframes),
    Case(
        name="AnimateDiffVideoToVideoPipeline",
        build=lambda: _pipe(AnimateDiffVideoToVideoPipeline),
        call=_from_video,
        samples=1,
    ),
    Case(
        name="AnimateDiffVideoToVideoControlNetPipeline",
        build=lambda: _pipe(AnimateDiffVideoToVideoControlNetPipeline, controlnet=control()),
        call=_from_controlled_video,
        samples=1,
    ),
)
