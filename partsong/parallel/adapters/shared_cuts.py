"""Names the cuts that many rows share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partsong.parallel.adapters.row import IMAGE, JOINT, TEXT, Adapter, Split

__all__ = [
    "BOTH",
    "Cuts",
    "EMBEDDED",
    "FLUX_ATTENTION",
    "HUNYUAN_ATTENTION",
    "JOINT_TOKENS",
    "ONE",
    "OPTIONAL",
    "PAIR",
    "PROJECTED",
    "SANA",
    "TEXT_FIRST",
    "TEXT_TOKENS",
    "TOKENS",
    "names",
    "returned",
    "rotary",
    "whole",
]

Cuts = Mapping[str | int, Split]

TOKENS = Split(dim=1)
TEXT_TOKENS = Split(dim=1, stream=TEXT)
JOINT_TOKENS = Split(dim=1, stream=JOINT)
OPTIONAL = Split(dim=1, optional=True)

#: What blocks return anew.
ONE = ("hidden_states",)
BOTH, TEXT_FIRST = ("hidden_states", "encoder_hidden_states"), ("encoder_hidden_states", "hidden_states")
#: Where picture and text enter the first block side by side, and where the picture leaves most models.
PAIR: Cuts = {"hidden_states": TOKENS, "encoder_hidden_states": TEXT_TOKENS}
PROJECTED = {"proj_out": TOKENS}

_FLUX_BLOCKS = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")
FLUX_ATTENTION: Mapping[str, tuple[str, ...]] = dict.fromkeys(_FLUX_BLOCKS, (TEXT, IMAGE))
HUNYUAN_ATTENTION: Mapping[str, tuple[str, ...]] = dict.fromkeys(_FLUX_BLOCKS, (IMAGE, TEXT))

#: Sana: attention that sums over all tokens, and convolutions over their grid.
SANA: dict[str, Any] = {
    "linear_attention": {"transformer_blocks.*.attn1": "SanaLinearAttnProcessor2_0"},
    "convolutions": ("transformer_blocks.*.ff.conv_depth",),
    "whole_rows": True,
}


def names(text: str) -> tuple[str, ...]:
    """Lists the words of a text."""
    return tuple(text.split())


def returned(dim: int = 1, stream: str = IMAGE) -> Cuts:
    """Cuts what a module returns."""
    return {0: Split(dim=dim, stream=stream, output=True)}


def rotary(dim: int) -> Cuts:
    """Cuts the cosines and sines of a rotary embedding that a module returns."""
    return {index: Split(dim=dim, output=True) for index in (0, 1)}


EMBEDDED = {"pos_embed": returned()}


def whole(family: str, model: str, why: str, inputs: str, **more: Any) -> Adapter:
    """Makes the row of a model whose input stays whole; `inputs` names the arguments that hold the batch."""
    return Adapter(family=family, model=model, whole=why, splits={}, gather={}, batched=names(inputs), **more)
