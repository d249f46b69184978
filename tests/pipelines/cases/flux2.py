"""Flux 2 and its small sibling Klein, from text and from reference pictures."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    Flux2KleinKVPipeline,
    Flux2KleinPipeline,
    Flux2Pipeline,
)

from tests.parallel.image_families import flux2
from tests.pipelines.case import Case
from tests.pipelines.parts import half_mask, picture
from tests.tiny_models.autoencoders import flux2_autoencoder
from tests.tiny_models.weights import noise, randomized


def _pipe(kind: Any, *, guidance_embeds: bool = False) -> Any:
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=flux2_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        transformer=randomized(flux2(6, in_channels=16, guidance_embeds=guidance_embeds)),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _guided(samples: int) -> dict[str, Any]:
    unwanted = {"negative_prompt_embeds": noise(samples, 7, 12, seed=2), "guidance_scale": 3.0}
    return _prompts(samples) | unwanted


def _picture(size: int = 96) -> Any:
    return picture(1, size, size)


def _painted(samples: int) -> dict[str, Any]:
    more = {"image": picture(1), "mask_image": half_mask(1), "strength": 0.7, "num_inference_steps": 3}
    return _guided(samples) | more


_KEPT = dict.fromkeys(
    (
        *("Ulysses", "Ring", "SyncPatch", "DisplacedPatch", "PartialPatch", "TokenRing", "Usp", "LatentParallel"),
        "LayerPipeline",
    ),
    "it keeps keys and values of reference tokens by position",
)

HERE = (
    Case(name="Flux2Pipeline", build=lambda: _pipe(Flux2Pipeline, guidance_embeds=True), call=_prompts),
    Case(name="Flux2KleinPipeline", build=lambda: _pipe(Flux2KleinPipeline), call=_guided),
    Case(name="Flux2KleinKVPipeline", build=lambda: _pipe(Flux2KleinKVPipeline), call=_prompts, refused=_KEPT),
    Case(name="Flux2KleinInpaintPipeline", build=lambda: _pipe(Flux2KleinInpaintPipeline), call=_painted),
)
