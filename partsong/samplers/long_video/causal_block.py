"""Reads how many frames of a causal video model see each other."""

from __future__ import annotations

from torch import nn

__all__ = ["CAUSAL_BLOCK", "causal_block"]

#: Configuration value with the number of latent frames of a causal model that see each other.
CAUSAL_BLOCK = "num_frame_per_block"


def causal_block(module: nn.Module) -> int:
    """Returns the latent frames of a causal model's block, which see each other and the past; 0 for other models."""
    config: object = getattr(module, "config", {})
    return int(config.get(CAUSAL_BLOCK, 0)) if hasattr(config, "get") else 0  # type: ignore[attr-defined]
