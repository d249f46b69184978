"""Finds the stacks of layers of a language model: one, or those of an encoder and a decoder called by themselves."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["entries_of", "stacks_of"]

#: Models whose encoder and decoder have their weights in common, and where these are.
_SEVERAL = {"diffusion_gemma": ("model.encoder.language_model", "model.decoder")}


def stacks_of(model: Any) -> list[nn.Module]:
    """Returns the stacks of a transformers model with a head over a vocabulary."""
    names = _SEVERAL.get(model.config.model_type)
    return [model.base_model] if names is None else [model.get_submodule(name) for name in names]


def entries_of(model: Any) -> list[nn.Module]:
    """Returns the modules that are called with the tokens of a call, whoever calls the stacks or their layers."""
    stacks: list[Any] = stacks_of(model)
    return stacks if len(stacks) == 1 else [stack.embed_tokens for stack in stacks]
