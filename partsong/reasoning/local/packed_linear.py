"""Holds linear layers with weights in oneDNN's own order: on a CPU a few rows then cost little more than one.

A decoding step multiplies a handful of rows by every weight of the model. The plain product repacks the weight in
every call or reads it in an order that does not suit so few rows; packed once, it is read at the speed of the memory.
A row's result does not depend on how many other rows there are, if there is at least one; the plain product does not
give that in float32. A single row gives the same result, too, with AVX2. With AVX-512 its last bits differ where a
layer reads more than about a thousand inputs in float32 (`least_rows` are never fewer there), and without AVX nearly
everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

__all__ = ["JoinedLinear", "PackedLinear", "can_pack", "is_plain", "least_rows", "pack_linears"]

#: Rows the packing is made for; it serves any number.
_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16)
#: Where torch keeps the hooks of a module's forward.
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


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
    refusal = _refusal(weight.dtype)
    return (True, "oneDNN") if refusal is None else (False, refusal)


@functools.cache
def _refusal(dtype: torch.dtype) -> str | None:
    """Says why this processor cannot pack a dtype, None if it can; the operators are tried once per process.

    Only a trial shows it: the instructions that bfloat16 needs differ between versions of oneDNN, and
    ONEDNN_MAX_CPU_ISA and its like take instructions away that the processor has.
    """
    operators = _operators()
    if not torch.backends.mkldnn.is_available() or operators is None:
        return f"torch {torch.__version__} was built without the oneDNN operators this needs"
    pack, multiply = operators
    try:
        with torch.inference_mode():
            weight = torch.ones(16, 16, dtype=dtype, device="cpu")
            multiply(weight[:1], pack(weight, _ROWS), None, "none", [], "")
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        seen = torch.backends.cpu.get_cpu_capability()
        return f"oneDNN cannot pack {dtype} on this processor, where torch sees {seen}: {message}"
    return None


def least_rows() -> int:
    """Returns how many rows a product should have at least: with AVX-512, four rows take less time than one or two."""
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


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
        # An attribute, not a buffer: a packed tensor can be neither saved nor moved.
        self.packed: Any = pack(linear.weight.detach(), _ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.parts: dict[str, int] | None = getattr(linear, "parts", None)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return self._multiply(x, self.packed, self.bias, "none", [], "")


class JoinedLinear(nn.Linear):
    """Computes several linear layers of one input as one product.

    Args:
        linears: the layers by name. They are not changed.

    Attributes:
        parts: their names, each with its number of outputs, in the order of the outputs.
    """

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        each, *_ = layers = list(linears.values())
        sizes = {name: layer.out_features for name, layer in linears.items()}
        super().__init__(each.in_features, sum(sizes.values()), bias=each.bias is not None, device="meta")
        self.parts = sizes
        for name in ("weight", "bias") if self.bias is not None else ("weight",):
            joined = torch.cat([getattr(layer, name).detach() for layer in layers])
            setattr(self, name, nn.Parameter(joined, requires_grad=False))


def is_plain(module: nn.Module, *, hooked: bool = False) -> TypeGuard[nn.Linear]:
    """Says whether a module is a linear layer with weights and nothing of its own.

    Args:
        module: any module.
        hooked: lets it have hooks.
    """
    if (
        type(module) not in (nn.Linear, JoinedLinear) or not cast("nn.Linear", module).weight.numel()
    ):  # other ranks run it
        return False
    return hooked or not (module._forward_hooks or module._forward_pre_hooks)


def pack_linears(module: nn.Module, *, hooked: bool = False) -> int:
    """Replaces all `nn.Linear` of a module by packed layers, in place.

    Subclasses of `nn.Linear`, which do something of their own, are left alone, and so are layers with hooks.

    Args:
        module: what has them.
        hooked: packs layers with hooks as well, which read no weights; the packed layers have the same hooks.

    Returns:
        How many were packed.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child, hooked=hooked) and can_pack(child.weight)[0]:
                packed = PackedLinear(child)
                for kind in _HOOKS:
                    setattr(packed, kind, getattr(child, kind))
                setattr(parent, name, packed)
                count += 1
    return count
