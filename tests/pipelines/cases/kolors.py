"""Kolors: Stable Diffusion XL's UNet with another text encoder."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from diffusers import DDIMScheduler

from tests.pipelines.case import Case
from tests.pipelines.cases.stable_diffusion import PAG, picture
from tests.pipelines.cases.stable_diffusion_xl import POOLED, unet
from tests.pipelines.parts import prompts
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise


def _found(path: str) -> Any:
    """A pipeline's class, which diffusers offers where sentencepiece is installed; only its tokenizer needs that."""
    stand_in = ModuleType("sentencepiece")
    stand_in.__spec__ = ModuleSpec("sentencepiece", None)
    vars(stand_in)["SentencePieceProcessor"] = object
    is_absent = sys.modules.setdefault("sentencepiece", stand_in) is stand_in
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"diffusers.pipelines.{module}"), name)
    finally:
        if is_absent:
            del sys.modules["sentencepiece"]


def _pipe(path: str, **more: Any) -> Any:
    scheduler = DDIMScheduler(clip_sample=False)
    parts = {"text_encoder": None, "tokenizer": None, "scheduler": scheduler}
    return _found(path)(vae=kl_autoencoder(), unet=unet(), **parts, **more)


def _drawn_over() -> Any:
    pipe = _pipe("kolors.pipeline_kolors_img2img.KolorsImg2ImgPipeline")
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    # Its call drops the pooled embeddings that it is given.
    pipe.encode_prompt = lambda prompt_embeds, **options: tuple(_call(len(prompt_embeds))[name] for name in names)
    return pipe


def _call(samples: int) -> dict[str, Any]:
    return prompts(samples) | {
        "pooled_prompt_embeds": noise(samples, POOLED, seed=3),
        "negative_pooled_prompt_embeds": noise(samples, POOLED, seed=4),
    }


def _from_picture(samples: int) -> dict[str, Any]:
    named = {name: value for name, value in _call(samples).items() if name not in ("height", "width")}
    return named | {"image": picture(samples), "num_inference_steps": 4, "strength": 0.6}


HERE = (
    Case(name="KolorsPipeline", build=lambda: _pipe("kolors.pipeline_kolors.KolorsPipeline"), call=_call),
    Case(name="KolorsImg2ImgPipeline", build=_drawn_over, call=_from_picture),
    Case(
        name="KolorsPAGPipeline",
        build=lambda: _pipe("pag.pipeline_pag_kolors.KolorsPAGPipeline", **PAG),
        call=_call,
    ),
)
