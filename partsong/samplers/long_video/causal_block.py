"""Reads how many frames of a causal video model see each other, and refuses models that are not causal."""

from __future__ import annotations

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import TEXT

__all__ = ["CAUSAL_BLOCK", "causal_block", "check_causal", "refuses_causal"]

#: Configuration value with the number of latent frames of a causal model that see each other.
CAUSAL_BLOCK = "num_frame_per_block"


def causal_block(module: nn.Module) -> int:
    """Returns the latent frames of a causal model's block, which see each other and the past; 0 for other models."""
    config: object = getattr(module, "config", {})
    return int(config.get(CAUSAL_BLOCK, 0)) if hasattr(config, "get") else 0  # type: ignore[attr-defined]


def refuses_causal(adapter: Adapter) -> str | None:
    """Says why an architecture cannot make a video from its past alone; None where it can."""
    if adapter.frames is None or adapter.frames.turns is None:
        return f"it is not known to be causal along time; {adapter.instead}"
    if any(TEXT in streams for streams in adapter.attention.values()):
        return (
            "its text attends to all frames and its frames to the text, so early frames would hear of later ones; "
            f"{adapter.instead}"
        )
    return None


def check_causal(strategy: str, module: nn.Module, adapter: Adapter, sink: int) -> None:
    """Refuses a model that was not trained to see only the past, and a sink longer than its block.

    Args:
        strategy: its name, for errors.
        module: the model.
        adapter: its row.
        sink: first latent frames of the video that every block sees.

    Raises:
        UnsupportedError: the model sees the future.
        ArgumentError: the sink is too long.
    """
    reason, block = refuses_causal(adapter), causal_block(module)
    if reason is not None:  # one rank needs such a loop too
        raise UnsupportedError(f"{strategy} on {adapter.model}: {reason}")
    if block < 2:
        raise UnsupportedError(
            f"{adapter.model}: {strategy} needs a model that sees the past alone; this one's configuration has no "
            f"{CAUSAL_BLOCK} of 2 or more. Use DualParallel for models that see all frames"
        )
    if sink > block:
        raise ArgumentError(f"{strategy}: sink={sink} frames; use at most {block}, the model's block")
