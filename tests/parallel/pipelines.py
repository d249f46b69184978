"""Real diffusers pipelines around the tiny models, built in place; prompts come as embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)

from tests.parallel.families import FAMILIES, dit, flux
from tests.tiny_models.autoencoders import kl_settings, wan_settings
from tests.tiny_models.weights import noise, randomize

STEPS = 3


def vae(dtype: torch.dtype) -> AutoencoderKL:
    torch.manual_seed(3)
    return AutoencoderKL(**kl_settings(shift_factor=0.1)).to(dtype).eval()


def _dit(dtype: torch.dtype) -> DiTPipeline:
    torch.manual_seed(11)
    model = dit(6, num_embeds_ada_norm=1000).eval()
    randomize(model)
    return DiTPipeline(model.to(dtype), vae(dtype), DDIMScheduler())


def _pixart(dtype: torch.dtype) -> PixArtAlphaPipeline:
    model = FAMILIES["PixArt"].model(6, dtype)
    return PixArtAlphaPipeline(None, None, vae(dtype), model, DPMSolverMultistepScheduler())


def _sd3(dtype: torch.dtype) -> StableDiffusion3Pipeline:
    model = FAMILIES["SD3"].model(6, dtype)
    return StableDiffusion3Pipeline(
        model, FlowMatchEulerDiscreteScheduler(), vae(dtype), None, None, None, None, None, None
    )


def _flux(dtype: torch.dtype) -> FluxPipeline:
    torch.manual_seed(11)
    model = flux(6, in_channels=16, num_single_layers=1).eval()
    randomize(model)
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae(dtype), None, None, None, None, model.to(dtype))


def _wan(dtype: torch.dtype) -> WanPipeline:
    model = FAMILIES["Wan"].model(6, dtype)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(None, None, AutoencoderKLWan(**wan_settings()), scheduler, model)


def embeds(batch: int, dtype: torch.dtype, length: int = 7, seed: int = 1) -> torch.Tensor:
    return noise(batch, length, 12, seed=seed, dtype=dtype)


def _dit_call(batch: int, dtype: torch.dtype, size: tuple[int, int]) -> dict[str, Any]:
    return {"class_labels": list(range(1, batch + 1)), "output_type": "pt"}


def _pixart_call(batch: int, dtype: torch.dtype, size: tuple[int, int]) -> dict[str, Any]:
    keep = torch.ones(1, 7)
    keep[:, 5:] = 0
    return {
        "prompt_embeds": embeds(1, dtype),
        "prompt_attention_mask": keep,
        "num_images_per_prompt": batch,
        "negative_prompt_embeds": embeds(1, dtype, seed=2),
        "negative_prompt_attention_mask": keep,
        "negative_prompt": None,
        "use_resolution_binning": False,
        "output_type": "latent",
        **sized(size),
    }


def _sd3_call(batch: int, dtype: torch.dtype, size: tuple[int, int]) -> dict[str, Any]:
    return {**pooled_call(batch, dtype), "output_type": "pt", **sized(size)}


def _flux_call(batch: int, dtype: torch.dtype, size: tuple[int, int]) -> dict[str, Any]:
    return {**pooled_call(batch, dtype), "true_cfg_scale": 3.0, "output_type": "latent", **sized(size)}


def pooled_call(batch: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "prompt_embeds": embeds(batch, dtype),
        "negative_prompt_embeds": embeds(batch, dtype, seed=2),
        "pooled_prompt_embeds": noise(batch, 10, seed=3, dtype=dtype),
        "negative_pooled_prompt_embeds": noise(batch, 10, seed=4, dtype=dtype),
    }


def _wan_call(batch: int, dtype: torch.dtype, size: tuple[int, int]) -> dict[str, Any]:
    return {
        "prompt_embeds": embeds(batch, dtype),
        "negative_prompt_embeds": embeds(batch, dtype, seed=2),
        "num_frames": 9,
        "output_type": "latent",
        **sized(size),
    }


def sized(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


@dataclass(frozen=True)
class Pipe:
    """How to build a pipeline and what to call it with; `calls` is how often it calls the model in a step."""

    build: Callable[[torch.dtype], Any]
    arguments: Callable[[int, torch.dtype, tuple[int, int]], dict[str, Any]]
    calls: int = 1

    def make(self, dtype: torch.dtype = torch.float64) -> Any:
        pipe = self.build(dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(
        self, pipe: Any, batch: int = 1, size: tuple[int, int] = (48, 80), seed: int | None = 9, **more: Any
    ) -> torch.Tensor:
        """One generation, with ``return_dict`` left at its default."""
        named = self.arguments(batch, pipe.transformer.dtype, size) | {"num_inference_steps": STEPS, **more}
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        output = pipe(**named, generator=generator)
        return torch.as_tensor(next(iter(output.values())))


PIPES = {
    "DiT": Pipe(_dit, _dit_call),
    "PixArt": Pipe(_pixart, _pixart_call),
    "SD3": Pipe(_sd3, _sd3_call),
    "Flux": Pipe(_flux, _flux_call, calls=2),
    "Wan": Pipe(_wan, _wan_call, calls=2),
}
