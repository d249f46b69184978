"""What partsong knows of each architecture, as data: where tokens enter and leave, which attention mixes them.

Supporting a new transformer means adding a row. Where a diffusers model class carries a context-parallel plan of its
own (``_cp_plan``), the row leaves `splits` and `gather` out and the class' plan is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError

__all__ = ["ADAPTERS", "Adapter", "Split", "adapter_for"]

IMAGE, TEXT = "image", "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One tensor that is cut along its tokens.

    Attributes:
        dim: the token dimension.
        stream: which token stream it belongs to; all tensors of a stream have the same number of tokens.
        ndim: cut only tensors of this many dimensions (others hold nothing per token); None cuts any.
        output: cut what the module returns instead of what it is given.
        optional: skip when the argument is None or absent.
    """

    dim: int
    stream: str = IMAGE
    ndim: int | None = None
    output: bool = False
    optional: bool = False


def _row(**values: Any) -> Mapping[Any, Any]:
    return MappingProxyType(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One architecture.

    Attributes:
        family: short name, as in the support table.
        model: class name of the diffusers transformer.
        attention: for each glob over module names, the token streams its self-attention mixes, in order. Attention
            that no glob names (cross-attention to a replicated text) stays local.
        splits: module path -> argument name, or output index -> `Split`. None reads the class' own ``_cp_plan``.
        gather: module path whose output is put together again, and its token dimension. None as above.
        sample: the argument that holds the noisy latents.
        batched: arguments of the root module whose first dimension is the batch; a dictionary argument is searched.
        refused: arguments of the root module that no parallel form here handles, with the reason.
        text_inputs: names that belong to the text stream when the splits come from ``_cp_plan``.
    """

    family: str
    model: str
    attention: Mapping[str, tuple[str, ...]]
    splits: Mapping[str, Mapping[str | int, Split]] | None = None
    gather: tuple[str, int] | None = None
    sample: str = "hidden_states"
    batched: tuple[str, ...] = ("hidden_states", "encoder_hidden_states", "timestep")
    refused: Mapping[str, str] = field(default_factory=dict)
    text_inputs: tuple[str, ...] = ()

    def resolved(self, module: nn.Module) -> Adapter:
        """This row with `splits` and `gather` filled in, from the model class' own plan where the row has none."""
        if self.splits is not None and self.gather is not None:
            return self
        plan = getattr(module, "_cp_plan", None)
        if not plan:
            raise UnsupportedError(
                f"{type(module).__name__} carries no context-parallel plan in this version of diffusers; "
                "diffusers 0.40 or newer is needed"
            )
        return _from_class_plan(self, plan)

    def streams_of(self, name: str) -> tuple[str, ...] | None:
        """The token streams mixed by the attention module called `name`; None for any other module."""
        for pattern, streams in self.attention.items():
            if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                return streams
        return None


def _from_class_plan(adapter: Adapter, plan: Mapping[str, Any]) -> Adapter:
    splits: dict[str, dict[str | int, Split]] = {}
    gather = None
    for path, entry in plan.items():
        if hasattr(entry, "gather_dim"):
            gather = (path, entry.gather_dim)
            continue
        splits[path] = {}
        for key, cut in entry.items():
            stream = TEXT if key in adapter.text_inputs else IMAGE
            splits[path][key] = Split(
                dim=cut.split_dim, stream=stream, ndim=cut.expected_dims, output=cut.split_output, optional=True
            )
    if gather is None:
        raise UnsupportedError(f"the context-parallel plan of {adapter.model} names no output to gather")
    return replace(adapter, splits=splits, gather=gather)


_CONTROL = "ControlNet residuals are full-length and would have to be cut; run without ControlNet"
_EMBEDDED = _row(pos_embed={0: Split(dim=1, output=True)})

_ROWS = (
    Adapter(
        family="DiT",
        model="DiTTransformer2DModel",
        attention=_row(**{"transformer_blocks.*.attn1": (IMAGE,)}),
        splits=_EMBEDDED,
        gather=("proj_out_2", 1),
        batched=("hidden_states", "timestep", "class_labels"),
    ),
    Adapter(
        family="PixArt",
        model="PixArtTransformer2DModel",
        attention=_row(**{"transformer_blocks.*.attn1": (IMAGE,)}),
        # The mask must be as long as the local tokens: diffusers silently pads one that is not.
        splits=MappingProxyType({**_EMBEDDED, "": {"attention_mask": Split(dim=-1, optional=True)}}),
        gather=("proj_out", 1),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "added_cond_kwargs",
            "attention_mask",
            "encoder_attention_mask",
        ),
    ),
    Adapter(
        family="SD3",
        model="SD3Transformer2DModel",
        attention=_row(
            **{"transformer_blocks.*.attn": (IMAGE, TEXT), "transformer_blocks.*.attn2": (IMAGE,)},
        ),
        splits=MappingProxyType({**_EMBEDDED, "context_embedder": {0: Split(dim=1, stream=TEXT, output=True)}}),
        gather=("proj_out", 1),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "pooled_projections"),
        refused=_row(block_controlnet_hidden_states=_CONTROL),
    ),
    Adapter(
        family="Flux",
        model="FluxTransformer2DModel",
        attention=_row(
            **{"transformer_blocks.*.attn": (TEXT, IMAGE), "single_transformer_blocks.*.attn": (TEXT, IMAGE)},
        ),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "pooled_projections", "guidance"),
        refused=_row(controlnet_block_samples=_CONTROL, controlnet_single_block_samples=_CONTROL),
        text_inputs=("encoder_hidden_states", "txt_ids"),
    ),
    Adapter(
        family="Wan",
        model="WanTransformer3DModel",
        attention=_row(**{"blocks.*.attn1": (IMAGE,)}),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_hidden_states_image"),
    ),
)

#: The supported architectures by the class name of their transformer.
ADAPTERS: Mapping[str, Adapter] = MappingProxyType({row.model: row for row in _ROWS})


def adapter_for(module: nn.Module) -> Adapter:
    """The row of a model, resolved.

    Raises:
        UnsupportedError: the architecture is not in `ADAPTERS`.
    """
    name = type(module).__name__
    if name not in ADAPTERS:
        raise UnsupportedError(
            f"{name} is not a supported architecture; supported are "
            + ", ".join(f"{row.model} ({row.family})" for row in ADAPTERS.values())
        )
    return ADAPTERS[name].resolved(module)
