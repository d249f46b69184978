"""Bria and its FIBO models."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    BriaFiboEditPipeline,
    BriaFiboPipeline,
    BriaPipeline,
    FlowMatchEulerDiscreteScheduler,
)

from tests.parallel.image_families_pairs import bria, fibo
from tests.pipelines.case import Case
from tests.pipelines.parts import Absent, pil_picture, prompts
from tests.tiny_models.autoencoders import kl_autoencoder, wan_autoencoder
from tests.tiny_models.weights import noise, randomized


def _bria() -> Any:
    transformer = randomized(bria(6, in_channels=16))
    return BriaPipeline(transformer, FlowMatchEulerDiscreteScheduler(), kl_autoencoder(shift_factor=0.1), None, None)


def _fibo(kind: Any) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = kind(randomized(fibo(6)), scheduler, wan_autoencoder(base_dim=4), Absent(), None)
    pipe.get_prompt_embeds = _encoded  # what the language model would answer
    return pipe


def _encoded(prompt: Any, **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    texts = [prompt] if isinstance(prompt, str) else prompt
    length = max(1, *map(len, texts), 1)
    states = [noise(len(texts), length, 12, seed=length + layer) for layer in range(3)]
    keep = torch.tensor([[float(place < max(1, len(text))) for place in range(length)] for text in texts]).double()
    return torch.cat(states[-2:], dim=-1), tuple(states), keep


def _call(samples: int) -> dict[str, Any]:
    return prompts(samples, guidance_scale=3.0)


def _spoken(samples: int) -> dict[str, Any]:
    named = {name: value for name, value in _call(samples).items() if "prompt" not in name}
    return named | {"prompt": ["a short one", "long"][:samples], "negative_prompt": ["none"] * samples}


def _edited(samples: int) -> dict[str, Any]:
    prompt = {"prompt": '{"edit_instruction": "a"}', "negative_prompt": "none", "_auto_resize": False}
    return _spoken(samples) | prompt | {"image": pil_picture()}


HERE = (
    Case(name="BriaPipeline", build=_bria, call=_call),
    Case(name="BriaFiboPipeline", build=lambda: _fibo(BriaFiboPipeline), call=_spoken),
    Case(name="BriaFiboEditPipeline", build=lambda: _fibo(BriaFiboEditPipeline), call=_edited, samples=1),
)
