"""The part of ComfyUI that samples, as little as a model without weights needs: a model, its noise, Euler's steps.

Names and the calls of the model are ComfyUI's; what they compute is written from the definitions.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Flow(nn.Module):
    """A model of flow matching: its prediction is the direction from the picture to the noise.

    Args:
        config: of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        assert config.unet_config["disable_unet_model_creation"]
        self.multiplier = config.multiplier

    def apply_model(
        self,
        x: Tensor,
        sigma: Tensor,
        c_crossattn: Tensor,
        transformer_options: Mapping[str, Any] | None = None,
        **conds: Tensor,
    ) -> Tensor:
        """Returns the picture that the model expects behind noisy latents."""
        module: Any = self.diffusion_model
        predicted = module(
            x.to(module.dtype),
            (sigma * self.multiplier).float(),
            context=c_crossattn.to(module.dtype),
            control=None,
            transformer_options=dict(transformer_options or {}),
            **conds,
        )
        return x - sigma.view(-1, *[1] * (x.ndim - 1)) * predicted.float()


def supported(multiplier: float) -> type:
    """Makes a class of ``comfy.supported_models``."""

    class Supported:
        def __init__(self, unet_config: dict[str, Any]) -> None:
            self.unet_config, self.multiplier = dict(unet_config), multiplier

        def set_inference_dtype(self, dtype: torch.dtype, manual_cast_dtype: torch.dtype | None) -> None:
            self.unet_config["dtype"] = dtype

        def get_model(self, state_dict: dict[str, Any], prefix: str = "", device: Any = None) -> Flow:
            return Flow(self)

    return Supported


def modules() -> dict[str, types.ModuleType]:
    """Returns the modules by name."""
    models = types.ModuleType("comfy.supported_models")
    models.__dict__.update(SD3=supported(1000), WAN21_T2V=supported(1000), Flux=supported(1), FluxSchnell=supported(1))
    patcher = types.ModuleType("comfy.model_patcher")
    patcher.__dict__["ModelPatcher"] = lambda model, load_device, offload_device: SimpleNamespace(model=model)
    return {"comfy.supported_models": models, "comfy.model_patcher": patcher}


def euler(patcher: Any, latents: Tensor, sigmas: Tensor, conds: Mapping[str, Tensor], cfg: float) -> Tensor:
    """Draws latents with guidance; both branches, first the one without the prompt, are one call."""
    for sigma, following in pairwise(sigmas):
        options = {"sample_sigmas": sigmas, "cond_or_uncond": [1, 0], "wrappers": {}}
        pair = patcher.model.apply_model(
            latents.repeat(2, *[1] * (latents.ndim - 1)), sigma.repeat(2), transformer_options=options, **conds
        )
        without, towards = pair.chunk(2)
        picture = without + cfg * (towards - without)
        latents = latents + (following - sigma) * (latents - picture) / sigma
    return latents
