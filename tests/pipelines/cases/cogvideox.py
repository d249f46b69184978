"""CogVideoX and Mochi, Latte: videos of 2024."""

from __future__ import annotations

from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import kl_autoencoder
from tests.pipelines.video_parts import cogvideox_autoencoder, kept, pictures


def _transformer(**changed: Any) -> CogVideoXTransformer3DModel:
    settings = {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 12,
        "num_layers": 2,
        "sample_width": 10,
        "sample_height": 6,
        "sample_frames": 9,
        "max_text_seq_length": 7,
    }
    return randomized(CogVideoXTransformer3DModel(**settings | changed))


def _pipe(kind: Any, transformer: Any, scheduler: Any = None) -> Any:
    return kind(
        tokenizer=None,
        text_encoder=None,
        vae=cogvideox_autoencoder(),
        transformer=transformer,
        scheduler=scheduler or CogVideoXDDIMScheduler(),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _video(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"num_frames": 9}


def _mochi() -> MochiPipeline:
    transformer = MochiTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        pooled_projection_dim=12,
        text_embed_dim=16,
        time_embed_dim=8,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return MochiPipeline(scheduler, None, None, None, randomized(transformer))


def _mochi_call(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {
        "prompt_embeds": noise(samples, 7, 16, seed=1),
        "prompt_attention_mask": kept(samples).bool(),
        "negative_prompt_embeds": noise(samples, 7, 16, seed=2),
        "negative_prompt_attention_mask": kept(samples, present=3).bool(),
        "num_frames": 13,
    }


def _latte() -> LattePipeline:
    transformer = LatteTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        sample_size=6,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=12,
        video_length=3,
    )
    return LattePipeline(None, None, kl_autoencoder(), randomized(transformer), DDIMScheduler())


def _latte_call(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"height": 48, "width": 48, "video_length": 3, "negative_prompt": None}


HERE = (
    Case(name="CogVideoXPipeline", build=lambda: _pipe(CogVideoXPipeline, _transformer()), call=_video),
    Case(
        name="CogVideoXPipeline + rotary",
        build=lambda: _pipe(
            CogVideoXPipeline, _transformer(use_rotary_positional_embeddings=True), CogVideoXDPMScheduler()
        ),
        call=_video,
    ),
    Case(
        name="CogVideoXImageToVideoPipeline",
        build=lambda: _pipe(
            CogVideoXImageToVideoPipeline,
            _transformer(
                in_channels=8,
                use_rotary_positional_embeddings=True,
                use_learned_positional_embeddings=True,
                ofs_embed_dim=8,
            ),
        ),
        call=lambda samples: _video(samples) | {"image": pictures(1)[0]},
        samples=1,
    ),
    Case(
        name="CogVideoXVideoToVideoPipeline",
        build=lambda: _pipe(CogVideoXVideoToVideoPipeline, _transformer()),
        call=lambda samples: _prompts(samples) | {"video": pictures(9), "num_inference_steps": 3},
        samples=1,
    ),
    Case(
        name="CogVideoXFunControlPipeline",
        build=lambda: _pipe(CogVideoXFunControlPipeline, _transformer(in_channels=8)),
        call=lambda samples: _prompts(samples) | {"control_video": pictures(9)},
        samples=1,
    ),
    Case(name="MochiPipeline", build=_mochi, call=_mochi_call),
    Case(name="LattePipeline", build=_latte, call=_latte_call),
)
