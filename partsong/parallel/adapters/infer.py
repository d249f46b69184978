"""A row for a model nobody wrote one for, where it is plain: embed, self-attending blocks, project.

Only the picture's tokens are cut; the text stays whole and is read by cross-attention. What cannot be seen in the
model's structure shows in the numbers: such a row is trusted only after its first call equalled the serial one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters.row import IMAGE, Adapter, Split

__all__ = ["inferred"]

_SAMPLE = "hidden_states"
#: Where diffusers models turn pictures into tokens `[B, L, C]`, and where the last layer is.
_EMBEDDERS = ("pos_embed", "patch_embed", "x_embedder", "img_in", "proj_in")
_PROJECTION = "proj_out"
#: Cross-attention by custom, where a module does not say that it is.
_CROSS = ("attn2", "cross_attn", "cross_attention")
#: Text comes in under such names.
_TEXT = ("encoder_", "txt_", "text_", "context", "caption")


def inferred(module: nn.Module) -> Adapter:
    """The row of a plain token model, to be verified.

    Args:
        module: a transformer without a row of its own.

    Raises:
        UnsupportedError: says what is missing or unclear.
    """
    arguments = tuple(inspect.signature(module.forward).parameters)
    if _SAMPLE not in arguments:
        raise UnsupportedError(f"its forward takes {', '.join(arguments)}, and no {_SAMPLE}")
    attention = {name: (IMAGE,) for name, child in module.named_modules() if _is_self_attention(name, child)}
    if not attention:
        raise UnsupportedError("it has no self-attention of diffusers' kinds")
    plan: Mapping[str, Any] | None = getattr(module, "_cp_plan", None)
    splits, gather = _from_plan(plan) if plan else _from_names(module)
    return Adapter(
        family=type(module).__name__,
        model=type(module).__name__,
        attention=attention,
        splits=splits,
        gather=gather,
        batched=arguments,
        inferred=True,
    )


def _is_self_attention(name: str, module: nn.Module) -> bool:
    if not isinstance(module, (Attention, AttentionModuleMixin)):
        return False
    return not (getattr(module, "is_cross_attention", False) or name.rpartition(".")[2] in _CROSS)


def _from_plan(plan: Mapping[str, Any]) -> tuple[dict[str, dict[str | int, Split]], dict[str, Split]]:
    splits: dict[str, dict[str | int, Split]] = {}
    gather = {}
    for path, entry in plan.items():
        if hasattr(entry, "gather_dim"):
            gather[path] = Split(dim=entry.gather_dim)
            continue
        if not isinstance(entry, Mapping):
            raise UnsupportedError(f"the context-parallel plan of its class has an entry of another form at {path!r}")
        # Text that is cut would need a gathered cross-attention; here every rank keeps all of it.
        splits[path] = {
            key: Split(dim=cut.split_dim, ndim=cut.expected_dims, output=cut.split_output, optional=True)
            for key, cut in entry.items()
            if not str(key).startswith(_TEXT)
        }
    if len(gather) != 1:
        raise UnsupportedError(f"the context-parallel plan of its class gathers {len(gather)} outputs, not one")
    return splits, gather


def _from_names(module: nn.Module) -> tuple[dict[str, dict[str | int, Split]], dict[str, Split]]:
    children = dict(module.named_children())
    embedder = next((name for name in _EMBEDDERS if name in children), None)
    if embedder is None:
        raise UnsupportedError(f"none of its modules is called {', '.join(_EMBEDDERS)}")
    if not isinstance(children.get(_PROJECTION), nn.Linear):
        raise UnsupportedError(f"it has no linear layer {_PROJECTION} as its last one")
    return {embedder: {0: Split(dim=1, ndim=3, output=True)}}, {_PROJECTION: Split(dim=1)}
