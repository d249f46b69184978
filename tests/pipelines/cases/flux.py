"""Flux, from text and from images."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxControlImg2ImgPipeline,
    FluxControlInpaintPipeline,
    FluxControlNetImg2ImgPipeline,
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
)

from tests.parallel.families import flux
from tests.pipelines.case import Case
from tests.pipelines.parts import half_mask, picture
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

#: Channels in front of the transformer: latents alone, with those of a control image, with a masked image and its mask.
_CONTROLLED, _FILLED = {"in_channels": 32, "out_channels": 16}, {"in_channels": 288, "out_channels": 16}
_SIZES = {"in_channels": 16, "num_single_layers": 1}


def control_net(**changed: Any) -> FluxControlNetModel:
    return randomized(flux(6, FluxControlNetModel, **_SIZES | changed))


def _pipe(kind: Any, *, control: bool = False, **changed: Any) -> Any:
    parts = {"controlnet": control_net()} if control else {}
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=kl_autoencoder(shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=randomized(flux(6, **_SIZES | changed)),
        **parts,
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "pooled_prompt_embeds": noise(samples, 10, seed=3),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _guided(samples: int) -> dict[str, Any]:
    unwanted = {
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_pooled_prompt_embeds": noise(samples, 10, seed=4),
    }
    return _prompts(samples) | unwanted | {"true_cfg_scale": 3.0}


def _from_image(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": picture(samples), "strength": 0.7, "num_inference_steps": 3}


def _painted(samples: int) -> dict[str, Any]:
    return _from_image(samples) | {"mask_image": half_mask(samples)}


def _controlled(samples: int) -> dict[str, Any]:
    return {"control_image": picture(samples, seed=6)}


def _filled(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": picture(samples), "mask_image": half_mask(samples)}


def _edited(samples: int) -> dict[str, Any]:
    # The pipeline joins one picture with every sample, and its size is an area.
    return _guided(samples) | {"image": picture(samples), "max_area": 48 * 80, "_auto_resize": False}


def _edited_in_part(samples: int) -> dict[str, Any]:
    return _edited(samples) | {"mask_image": half_mask(samples), "strength": 0.7, "num_inference_steps": 3}


HERE = (
    Case(name="FluxPipeline", build=lambda: _pipe(FluxPipeline), call=_guided),
    Case(name="FluxImg2ImgPipeline", build=lambda: _pipe(FluxImg2ImgPipeline), call=_from_image),
    Case(name="FluxInpaintPipeline", build=lambda: _pipe(FluxInpaintPipeline), call=_painted),
    Case(name="FluxFillPipeline", build=lambda: _pipe(FluxFillPipeline, **_FILLED), call=_filled),
    Case(name="FluxKontextPipeline", build=lambda: _pipe(FluxKontextPipeline), call=_edited),
    Case(name="FluxKontextInpaintPipeline", build=lambda: _pipe(FluxKontextInpaintPipeline), call=_edited_in_part),
    Case(
        name="FluxControlPipeline",
        build=lambda: _pipe(FluxControlPipeline, **_CONTROLLED),
        call=lambda samples: _prompts(samples) | _controlled(samples),
    ),
    Case(
        name="FluxControlImg2ImgPipeline",
        build=lambda: _pipe(FluxControlImg2ImgPipeline, **_CONTROLLED),
        call=lambda samples: _from_image(samples) | _controlled(samples),
    ),
    Case(
        name="FluxControlInpaintPipeline",
        build=lambda: _pipe(FluxControlInpaintPipeline, **_CONTROLLED),
        call=lambda samples: _painted(samples) | _controlled(samples),
    ),
    Case(
        name="FluxControlNetPipeline",
        build=lambda: _pipe(FluxControlNetPipeline, control=True),
        call=lambda samples: _guided(samples) | _controlled(samples),
    ),
    Case(
        name="FluxControlNetImg2ImgPipeline",
        build=lambda: _pipe(FluxControlNetImg2ImgPipeline, control=True),
        call=lambda samples: _from_image(samples) | _controlled(samples),
    ),
    Case(
        name="FluxControlNetInpaintPipeline",
        build=lambda: _pipe(FluxControlNetInpaintPipeline, control=True),
        call=lambda samples: _painted(samples) | _controlled(samples),
    ),
)

LEFT = {"FluxPriorReduxPipeline": "it turns a picture into embeddings in one pass and denoises nothing"}
