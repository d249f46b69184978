"""Infers a row for a plain model that has none: one that embeds, runs self-attending blocks and projects.

Only the picture's tokens are cut; the text stays whole and is read by cross-attention. The structure does not show
everything, so an inferred row is trusted only after its first call has given what one rank gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters.row import IMAGE, Adapter, Gather, Split, Splits, read_class_plan
from partsong.parallel.hooks.model_hooks import signature_of

__all__ = ["inferred"]

_SAMPLE = "hidden_states"
#: Names of the layers that turn pictures into tokens `[B, L, C]`, and of the last layer, in diffusers models.
_EMBEDDERS = ("pos_embed", "patch_embed", "x_embedder", "img_in", "proj_in")
_PROJECTION = "proj_out"
#: Names that cross-attention usually has, where a module does not say that it is one.
_CROSS = ("attn2", "cross_attn", "cross_attention")
#: How the names of text arguments begin.
_TEXT = ("encoder_", "txt_", "text_", "context", "caption")


def inferred(module: nn.Module) -> Adapter:
    """Infers the row of a plain token model, which still has to be verified.

    Args:
        module: a transformer without a row of its own.

    Raises:
        UnsupportedError: says what is missing or unclear.
    """
    arguments = tuple(signature_of(module).parameters)
    if _SAMPLE not in arguments:
        raise UnsupportedError(f"its forward takes {', '.join(arguments)}, and no {_SAMPLE}")
    attention = {name: (IMAGE,) for name, child in module.named_modules() if _is_self_attention(name, child)}
    if not attention:
        raise UnsupportedError("it has no self-attention of diffusers' kinds")
    plan: Mapping[str, Any] | None = getattr(module, "_cp_plan", None)
    model = type(module).__name__
    # Text that is cut would need a gathered cross-attention; here every rank keeps all of it.
    keep_text = lambda key: None if str(key).startswith(_TEXT) else IMAGE  # noqa: E731
    splits, gather = read_class_plan(plan, model, keep_text) if plan else _from_names(module)
    return Adapter(
        family=model, model=model, attention=attention, splits=splits, gather=gather, batched=arguments, inferred=True
    )


def _is_self_attention(name: str, module: nn.Module) -> bool:
    if not isinstance(module, (Attention, AttentionModuleMixin)):
        return False
    return not (getattr(module, "is_cross_attention", False) or name.rpartition(".")[2] in _CROSS)


def _from_names(module: nn.Module) -> tuple[Splits, Gather]:
    children = dict(module.named_children())
    embedder = next((name for name in _EMBEDDERS if name in children), None)
    if embedder is None:
        raise UnsupportedError(f"none of its modules is called {', '.join(_EMBEDDERS)}")
    if not isinstance(children.get(_PROJECTION), nn.Linear):
        raise UnsupportedError(f"it has no linear layer {_PROJECTION} as its last one")
    return {embedder: {0: Split(dim=1, ndim=3, output=True)}}, {_PROJECTION: Split(dim=1)}
