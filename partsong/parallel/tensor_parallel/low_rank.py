"""Knows the layers that a LoRA puts around a linear one: their columns are cut like its own."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["base_of", "readers_of", "variant_of", "writers_of"]


def base_of(layer: Any) -> Any:
    """Returns the layer that a plain LoRA of peft was put around, or into which one was merged; else the layer itself.

    A plain one adds two matrix products and a factor. Its variants, such as DoRA, look across columns.
    """
    if not _is_low_rank(layer) or (variant_of(layer) and not layer.merged):
        return layer
    return layer.base_layer


def variant_of(layer: Any) -> str | None:
    """Names what a LoRA layer computes beyond a plain one; None where it is plain or not a LoRA."""
    if not _is_low_rank(layer):
        return None
    if any(getattr(layer, "use_dora", {}).values()):
        return "DoRA"
    return (
        "variant of LoRA" if getattr(layer, "lora_variant", None) or getattr(layer, "lora_embedding_A", None) else None
    )


def writers_of(layer: Any) -> list[nn.Module]:
    """Lists the layers with a layer's outputs: itself, or for a LoRA the base layer and the second half."""
    return [layer] if base_of(layer) is layer else [layer.base_layer, *_halves(layer, "lora_B")]


def readers_of(layer: Any) -> list[nn.Module]:
    """Lists the layers with a layer's inputs: itself, or for a LoRA the base layer and the first half."""
    return [layer] if base_of(layer) is layer else [layer.base_layer, *_halves(layer, "lora_A")]


def _halves(layer: Any, name: str) -> list[nn.Module]:
    # A merged LoRA is not called, so its shape does not matter.
    return [] if variant_of(layer) else list(getattr(layer, name).values())


def _is_low_rank(layer: Any) -> bool:
    return type(layer).__module__.startswith("peft.tuners.lora.") and hasattr(layer, "base_layer")
