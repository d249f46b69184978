"""Modular pipelines: one with a guider, and one whose own block asks the model for three branches of guidance."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ClassifierFreeGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from diffusers.modular_pipelines.stable_diffusion_3.denoise import StableDiffusion3LoopDenoiser
from diffusers.modular_pipelines.stable_diffusion_3.modular_blocks_stable_diffusion_3 import (
    StableDiffusion3T2ICoreDenoiseStep,
)

from tests.pipelines.case import Case
from tests.pipelines.cases import CASES
from tests.tiny_models.weights import noise


class ThreeBranches(StableDiffusion3LoopDenoiser):
    """A block that moves away from what it predicts without a prompt and from what it predicts with another one."""

    @torch.no_grad()
    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> tuple[Any, Any]:
        """Calls the model three times."""
        given, latents = block_state, block_state.latents
        texts = (
            (given.prompt_embeds, given.pooled_prompt_embeds),
            (given.negative_prompt_embeds, given.negative_pooled_prompt_embeds),
            (given.prompt_embeds.flip(1), given.pooled_prompt_embeds.flip(1)),
        )
        wanted, unwanted, other = (
            components.transformer(
                hidden_states=latents,
                timestep=t.expand(len(latents)),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
            for text, pooled in texts
        )
        block_state.noise_pred = unwanted + 3.0 * (wanted - unwanted) + 1.5 * (wanted - other)
        return components, block_state


def _build(guider: Any = None, denoiser: Any = None) -> Any:
    parts = CASES["StableDiffusion3Pipeline"].build().components
    blocks = StableDiffusion3T2ICoreDenoiseStep()
    if denoiser is not None:
        blocks.sub_blocks["denoise"].sub_blocks["denoiser"] = denoiser
    pipe = blocks.init_pipeline()
    pipe.update_components(**{name: parts[name] for name in ("transformer", "scheduler")})
    if guider is not None:
        pipe.update_components(guider=guider)
    return pipe


def _call(samples: int) -> dict[str, Any]:
    names = ("prompt_embeds", "negative_prompt_embeds")
    texts = {name: noise(samples, 7, 12, seed=1 + number) for number, name in enumerate(names)}
    pooled = {
        f"pooled_{names[0]}": noise(samples, 10, seed=3),
        "negative_pooled_prompt_embeds": noise(samples, 10, seed=4),
    }
    return texts | pooled | {"num_inference_steps": 3, "height": 48, "width": 80, "output": "latents"}


def _skipping() -> Any:
    skipped = LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False)
    return SkipLayerGuidance(
        guidance_scale=3.0, skip_layer_guidance_stop=1.0, skip_layer_guidance_start=0.0, skip_layer_config=skipped
    )


MODULAR = {
    case.name: case
    for case in (
        Case(name="ModularPipeline", build=lambda: _build(ClassifierFreeGuidance(guidance_scale=3.0)), call=_call),
        Case(name="ModularPipeline that skips layers", build=lambda: _build(_skipping()), call=_call),
        Case(name="ModularPipeline with three branches", build=lambda: _build(denoiser=ThreeBranches()), call=_call),
    )
}
