"""Says which decoders of transformers compute keys that can be kept, shared and read by any later token."""

from __future__ import annotations

from typing import Any

__all__ = ["why_keys_cannot_be_kept"]

#: Rotary embeddings whose frequencies depend on the longest position of the call.
_CHANGING_ROTARY = ("dynamic", "longrope")


def why_keys_cannot_be_kept(config: Any) -> str | None:
    """Says why keys of one call must not be reused by another, or by all tokens; None where they may.

    Args:
        config: the configuration of a transformers model.

    >>> from transformers import MistralConfig
    >>> why_keys_cannot_be_kept(MistralConfig(sliding_window=4))
    'mistral with a sliding window of 4: only layers that attend to all tokens they are shown are supported'
    """
    kinds = getattr(config, "layer_types", None)
    local = [kind for kind in kinds or [] if kind != "full_attention"]
    window = None if kinds else getattr(config, "sliding_window", None)
    if local or window is not None:
        return (
            f"{config.model_type} with {local[0] if local else f'a sliding window of {window}'}: only layers that "
            f"attend to all tokens they are shown are supported"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary in _CHANGING_ROTARY:
        return f"rotary embedding {rotary!r} changes with the length of each call, so keys of two calls do not mix"
    return None
