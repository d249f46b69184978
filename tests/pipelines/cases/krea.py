"""Krea 2, Ovis-Image, LongCat-Image, Nucleus-Image and ERNIE-Image, whose prompts come as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ErnieImagePipeline,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    LongCatImageEditPipeline,
    LongCatImagePipeline,
    NucleusMoEImagePipeline,
    OvisImagePipeline,
)

from tests.parallel.image_families_pairs import longcat, ovis
from tests.parallel.image_families_sequences import ernie, krea2, nucleus
from tests.pipelines.case import Case
from tests.pipelines.parts import Absent, coarse, pil_picture, prompts
from tests.tiny_models.autoencoders import flux2_autoencoder, kl_autoencoder, qwen_autoencoder
from tests.tiny_models.weights import noise, randomized


def _krea() -> Any:
    transformer = randomized(krea2(6, in_channels=16))
    return Krea2Pipeline(_flow(), qwen_autoencoder(), None, None, transformer)


def _flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler()


def _ovis() -> Any:
    return OvisImagePipeline(_flow(), kl_autoencoder(shift_factor=0.1), None, None, randomized(ovis(6, channels=16)))


def _longcat(kind: Any) -> Any:
    transformer = randomized(longcat(6, in_channels=64))  # the pipelines know 16 channels only
    vae = kl_autoencoder(shift_factor=0.1, latent_channels=16)
    pipe = kind(_flow(), vae, Absent(), None, Absent(), transformer)
    if kind is LongCatImageEditPipeline:
        pipe.vae, pipe.vae_scale_factor = coarse(vae), 8 * pipe.vae_scale_factor
    encode = pipe.encode_prompt  # it measures the prompt, also where it gets embeddings
    pipe.encode_prompt = lambda prompt, prompt_embeds, **more: encode(
        prompt=[""] * len(prompt_embeds), prompt_embeds=prompt_embeds, **more
    )
    return pipe


def _nucleus() -> Any:
    transformer = randomized(nucleus(6, in_channels=16))
    return NucleusMoEImagePipeline(transformer, _flow(), qwen_autoencoder(), None, None)


def _ernie() -> Any:
    return ErnieImagePipeline(randomized(ernie(6, channels=16)), flux2_autoencoder(), None, None, _flow())


def _call(samples: int) -> dict[str, Any]:
    return prompts(samples, guidance_scale=3.0)


def _masked(samples: int) -> dict[str, Any]:
    keep = torch.ones(samples, 7, dtype=torch.bool)
    keep[-1, 5:] = False
    return _call(samples) | {"prompt_embeds_mask": keep, "negative_prompt_embeds_mask": keep}


def _layers(samples: int) -> dict[str, Any]:
    stacks = {
        "prompt_embeds": noise(samples, 7, 3, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 7, 3, 12, seed=2),
    }
    return _masked(samples) | stacks


def _listed(samples: int) -> dict[str, Any]:
    named = _call(samples)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        named[name] = [text[: 7 - 2 * index] for index, text in enumerate(named[name])]
    return named


def _edited(samples: int) -> dict[str, Any]:
    named = _call(samples) | {"image": pil_picture()}
    return {name: value for name, value in named.items() if name not in ("height", "width")}


HERE = (
    Case(name="Krea2Pipeline", build=_krea, call=_layers),
    Case(name="OvisImagePipeline", build=_ovis, call=lambda samples: _call(samples) | {"negative_prompt": None}),
    Case(
        name="LongCatImagePipeline",
        build=lambda: _longcat(LongCatImagePipeline),
        call=lambda samples: _call(samples) | {"enable_prompt_rewrite": False},
    ),
    Case(name="LongCatImageEditPipeline", build=lambda: _longcat(LongCatImageEditPipeline), call=_edited, samples=1),
    Case(name="NucleusMoEImagePipeline", build=_nucleus, call=_masked),
    Case(name="ErnieImagePipeline", build=_ernie, call=_listed),
)
