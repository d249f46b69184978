"""Linear layers whose weights lie in oneDNN's own order: on a CPU a few rows then cost little more than one.

A decoding step multiplies a handful of rows by every weight of the model. The plain product repacks the weight in
every call or reads it in an order that does not suit so few rows; packed once, it is read at the speed of the memory.
A row's result was found not to depend on how many rows are with it, which the plain product does not give either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack", "pack_linears"]

#: Rows the packing is made for; it serves any number.
_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16)


def _operators() -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    try:
        return torch.ops.mkldnn._reorder_linear_weight.default, torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None


def can_pack(weight: Tensor) -> tuple[bool, str]:
    """Whether such a weight can be packed here, and why not.

    >>> can_pack(torch.zeros(2, 2, dtype=torch.float64))[0]
    False
    """
    if not weight.is_cpu:
        return False, f"the weights are on {weight.device}, packing is for the CPU"
    if weight.dtype not in _DTYPES:
        return False, f"the weights are {weight.dtype}, packing takes float32 and bfloat16"
    if not torch.backends.mkldnn.is_available() or _operators() is None:
        return False, f"torch {torch.__version__} was built without the oneDNN operators this needs"
    return True, "oneDNN"


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed copy of its weight; inference only.

    Args:
        linear: whose weight and bias are taken; it is not changed.

    >>> linear = nn.Linear(16, 8)
    >>> x = torch.ones(3, 16)
    >>> bool(torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-6))
    True
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        operators = _operators()
        assert operators is not None
        pack, self._multiply = operators
        # An attribute, no buffer: a packed tensor can be neither saved nor moved.
        self.packed: Any = pack(linear.weight.detach(), _ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return self._multiply(x, self.packed, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> int:
    """Puts packed layers in the place of all `nn.Linear` of a module, in place.

    Subclasses of `nn.Linear` do something of their own and stay, and so do layers somebody has hooked.

    Returns:
        How many were packed.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not _hooked(child) and can_pack(child.weight)[0]:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
