"""Random low-rank adapters for tiny models, as the state of a file that `load_lora_weights` takes."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

#: Layers of attention and of feed-forward parts, by the names of transformers and of UNets.
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
CONVOLUTIONS = ["conv1", "conv2", "proj_in"]


def lora_state(model: Any, seed: int, *, layers: list[str] = LAYERS, dora: bool = False) -> dict[str, Tensor]:
    """The weights of an adapter for a model, random and large enough to change its picture."""
    model.add_adapter(LoraConfig(r=3, lora_alpha=3, target_modules=layers, use_dora=dora))
    state = get_peft_model_state_dict(model, adapter_name="default")
    random = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(value.shape, generator=random).to(value) for name, value in state.items()}
    # The lengths that a DoRA gives to rows are near one, and its other weights, like any LoRA's, near zero.
    return {name: 0.2 * value + (1 if "magnitude" in name else 0) for name, value in drawn.items()}


def load_lora(pipe: Any, name: str, seed: int, **more: Any) -> None:
    """Loads such an adapter into a pipeline's denoiser, as from a file."""
    part = "transformer" if getattr(pipe, "transformer", None) is not None else "unet"
    whole = _without_adapters(getattr(pipe, part))
    state = {f"{part}.{key}": value for key, value in lora_state(whole, seed, **more).items()}
    pipe.load_lora_weights(state, adapter_name=name)


def _without_adapters(model: Any) -> Any:
    """A model of the same configuration without what is on this one."""
    parameter = next(model.parameters())
    return type(model)(**model.config).to(parameter.dtype)
