"""HunyuanVideo 1.0 and 1.5, its image-to-video forms, and FramePack."""

from __future__ import annotations

from typing import Any

from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)

from tests.parallel.video_families import hunyuan_video_like
from tests.parallel.video_families_2026 import hunyuan_video_15
from tests.pipelines.case import Case
from tests.pipelines.parts import prompts
from tests.pipelines.video_parts import (
    hunyuan_video_15_autoencoder,
    hunyuan_video_autoencoder,
    kept,
    pictures,
    siglip_vision,
    siglip_vision_processor,
)
from tests.tiny_models.weights import noise, randomized


def _transformer(kind: Any = HunyuanVideoTransformer3DModel, **changed: Any) -> Any:
    return randomized(hunyuan_video_like(kind, **{"guidance_embeds": False} | changed))


def _pipe(kind: Any, transformer: Any, **more: Any) -> Any:
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    parts = {"vae": hunyuan_video_autoencoder(), "scheduler": FlowMatchEulerDiscreteScheduler()}
    return kind(transformer=transformer, **dict.fromkeys(names), **parts | more)


def _prompts(samples: int) -> dict[str, Any]:
    return prompts(
        samples,
        prompt_attention_mask=kept(samples),
        pooled_prompt_embeds=noise(samples, 10, seed=3),
        negative_prompt_attention_mask=kept(samples),
        negative_pooled_prompt_embeds=noise(samples, 10, seed=4),
        true_cfg_scale=3.0,
        num_frames=9,
    )


def _from_picture(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": pictures(1)[0]}


def _framepack() -> Any:
    transformer = _transformer(
        HunyuanVideoFramepackTransformer3DModel,
        guidance_embeds=True,
        image_condition_type=None,
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )
    seeing = {"image_encoder": siglip_vision(8), "feature_extractor": siglip_vision_processor()}
    return _pipe(HunyuanVideoFramepackPipeline, transformer, **seeing)


def _later(kind: Any, **more: Any) -> Any:
    sizes = {"in_channels": 9, "patch_size": 1, "target_size": 96, "task_type": "t2v"}
    transformer = randomized(hunyuan_video_15(6, **sizes))
    guider = ClassifierFreeGuidance(guidance_scale=3.0)
    return _pipe(kind, transformer, guider=guider, vae=hunyuan_video_15_autoencoder(), **more)


def _later_prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_embeds_mask": kept(samples),
        "prompt_embeds_2": noise(samples, 5, 6, seed=3),
        "prompt_embeds_mask_2": kept(samples, 5, 2),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_prompt_embeds_mask": kept(samples),
        "negative_prompt_embeds_2": noise(samples, 5, 6, seed=4),
        "negative_prompt_embeds_mask_2": kept(samples, 5, 3),
        "num_inference_steps": 2,
        "output_type": "latent",
        "num_frames": 9,
    }


HERE = (
    Case(name="HunyuanVideoPipeline", build=lambda: _pipe(HunyuanVideoPipeline, _transformer()), call=_prompts),
    Case(
        name="HunyuanVideoImageToVideoPipeline",
        build=lambda: _pipe(
            HunyuanVideoImageToVideoPipeline,
            _transformer(in_channels=9, image_condition_type="latent_concat"),
            image_processor=None,
        ),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="HunyuanVideoImageToVideoPipeline + first frame",
        build=lambda: _pipe(
            HunyuanVideoImageToVideoPipeline,
            _transformer(image_condition_type="token_replace", guidance_embeds=True),
            image_processor=None,
        ),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="HunyuanSkyreelsImageToVideoPipeline",
        build=lambda: _pipe(HunyuanSkyreelsImageToVideoPipeline, _transformer(in_channels=8)),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="HunyuanVideoFramepackPipeline",
        build=_framepack,
        call=lambda samples: _from_picture(samples) | {"latent_window_size": 3},
        samples=1,
    ),
    Case(
        name="HunyuanVideo15Pipeline",
        build=lambda: _later(HunyuanVideo15Pipeline),
        call=lambda samples: _later_prompts(samples) | {"height": 48, "width": 80},
    ),
    Case(
        name="HunyuanVideo15ImageToVideoPipeline",
        build=lambda: _later(
            HunyuanVideo15ImageToVideoPipeline,
            image_encoder=siglip_vision(8),
            feature_extractor=siglip_vision_processor(),
        ),
        call=lambda samples: _later_prompts(samples) | {"image": pictures(1)[0]},
        samples=1,
    ),
)
