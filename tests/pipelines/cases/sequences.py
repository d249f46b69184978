"""Ideogram 4 and Bria FIBO 2, which put text and pictures in one sequence, and VisualCloze."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    BriaFibo2Pipeline,
    BriaFibo2Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
    VisualClozeGenerationPipeline,
    VisualClozePipeline,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import Absent, Letters, kl_autoencoder, pil_picture


def _flux2_autoencoder(channels: int = 4) -> AutoencoderKLFlux2:
    return randomized(
        AutoencoderKLFlux2(
            block_out_channels=(4,) * 4,
            latent_channels=channels,
            norm_num_groups=2,
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
    )


def _ideogram() -> Any:
    def transformer() -> Any:
        return randomized(
            Ideogram4Transformer2DModel(
                in_channels=128,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=3,
                intermediate_size=16,
                adaln_dim=8,
                llm_features_dim=24,
                mrope_section=(2, 1, 1),
            )
        )

    scheduler = FlowMatchEulerDiscreteScheduler()
    models = {"transformer": transformer(), "unconditional_transformer": transformer()}
    pipe = Ideogram4Pipeline(scheduler, _flux2_autoencoder(32), Absent(), Letters(), **models)
    pipe._get_text_encoder_hidden_states = lambda encoder, ids, *rest: [
        noise(*ids.shape, 12, seed=layer) for layer in range(2)
    ]
    return pipe


def _fibo2() -> Any:
    transformer = BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=24,
        n_layers=2,
        n_heads=3,
        n_refiner_layers=1,
        cap_feat_dim=12,
        axes_dims=(2, 2, 4),
        axes_lens=(64, 32, 32),
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=3,
        max_num_gist_tokens=5,
        gist_step=1,
        gist_min_text_len=2,
        gist_max_text_len=8,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return BriaFibo2Pipeline(randomized(transformer), scheduler, _flux2_autoencoder(), Absent(), None)


def _cloze(kind: Any) -> Any:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=288,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    encoders = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2")}
    vae = kl_autoencoder(shift_factor=0.1)
    pipe = kind(FlowMatchEulerDiscreteScheduler(), vae, transformer=randomized(transformer), resolution=32, **encoders)
    for part in (pipe, getattr(pipe, "generation_pipe", pipe), getattr(pipe, "upsampling_pipe", pipe)):
        part._get_clip_prompt_embeds = lambda **options: noise(1, 10, seed=3)  # what the text encoders would answer
        part._get_t5_prompt_embeds = lambda **options: noise(1, 7, 12, seed=1)
    return pipe


def _ideogram_call(samples: int) -> dict[str, Any]:
    return {
        "prompt": ["a short one", "long"][:samples],
        "max_sequence_length": 13,
        "guidance_schedule": (3.0, 2.0),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _fibo2_call(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 2, 7, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 2, 7, 12, seed=2),
        "prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.bool),
        "negative_prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.bool),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _cloze_call(samples: int) -> dict[str, Any]:
    return {
        "task_prompt": "task",
        "content_prompt": "content",
        "image": [[pil_picture(32, 32), pil_picture(32, 32, seed=6)], [pil_picture(32, 32, seed=7), None]],
        "num_inference_steps": 2,
        "output_type": "latent",
    }


HERE = (
    Case(name="Ideogram4Pipeline", build=_ideogram, call=_ideogram_call),
    Case(name="BriaFibo2Pipeline", build=_fibo2, call=_fibo2_call),
    Case(
        name="VisualClozeGenerationPipeline",
        build=lambda: _cloze(VisualClozeGenerationPipeline),
        call=_cloze_call,
        samples=1,
    ),
    Case(
        name="VisualClozePipeline",
        build=lambda: _cloze(VisualClozePipeline),
        call=lambda samples: _cloze_call(samples) | {"upsampling_strength": 0.0, "output_type": "pt"},
        samples=1,
    ),
)

LEFT = {"OmniGenPipeline": "its processor of prompts and pictures needs torchvision, which is not installed here"}
