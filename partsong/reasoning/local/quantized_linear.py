"""Holds linear layers with weights of 8 or 4 bits: on a CPU a step reads a quarter or an eighth of the bytes.

The result differs from that of floating-point weights, but stays close to it. A weight is rounded to steps of a scale:
with int8 one scale for each output, with int4 a scale and an offset for each 32 inputs of an output. The inputs of a
layer are rounded to bfloat16, for which torch has fast products of this kind; the rest of the model keeps its dtype. A
row's result does not depend on the other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["Weights", "QuantizedLinear", "quantize_linears", "why_not_quantized"]

Weights = Literal["int8", "int4"]

#: Inputs that share a scale, with int4.
_GROUP = 32
#: Outputs come in multiples of this in torch's order of int4 weights.
_OUTPUTS = 16
_INT8, _INT4 = 127, 15
#: The least scale, for weights that are all 0.
_TINY = 1e-8


def _int8(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Rounds a weight `[O, I]` to int8; returns what multiplies bfloat16 rows `[N, I]` with it."""
    # Rounded first, so that the integers fit the scale that is used.
    scale = (weight.abs().amax(1) / _INT8).clamp(min=_TINY).bfloat16()
    whole = (weight / scale.float()[:, None]).round().clamp(-_INT8, _INT8).to(torch.int8).contiguous()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, whole, scale)


def _int4(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Rounds a weight `[O, I]` to int4; returns what multiplies bfloat16 rows `[N, I]` with it."""
    groups = weight.view(len(weight), -1, _GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _INT4).clamp(min=_TINY).bfloat16()
    # torch counts integers from the middle one, 8.
    middle = (low + 8 * scale.float()).bfloat16()
    whole = ((groups - middle.float()[..., None]) / scale.float()[..., None]).round() + 8
    whole = whole.clamp(0, _INT4).to(torch.int32).view_as(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
    known = torch.stack([scale, middle], -1).transpose(0, 1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, _GROUP, known)


_KINDS: dict[Weights, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {"int8": _int8, "int4": _int4}


class QuantizedLinear(nn.Module):
    """`nn.Linear` over a rounded copy of its weight; inference only, on CPUs.

    Args:
        linear: whose weight and bias are taken; it is not changed.
        weights: "int8" or "int4"; `why_not_quantized` says where it cannot be.

    >>> linear = nn.Linear(32, 16)
    >>> x = torch.ones(3, 32)
    >>> bool(torch.allclose(QuantizedLinear(linear, "int8")(x), linear(x), atol=0.05))
    True
    """

    def __init__(self, linear: nn.Linear, weights: Weights) -> None:
        super().__init__()
        # An attribute, not a buffer: these weights can be neither saved nor moved.
        self._multiply: Any = _KINDS[weights](linear.weight.detach().float())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        out = self._multiply(x.reshape(-1, self.in_features).bfloat16()).to(x.dtype)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def quantize_linears(module: nn.Module, weights: Weights) -> int:
    """Replaces all `nn.Linear` of a module by rounded layers, in place.

    Subclasses of `nn.Linear`, which do something of their own, are left alone, and so are layers with hooks and, with
    int4, layers whose sizes are not multiples of a group.

    Returns:
        How many were rounded.

    Raises:
        ArgumentError: there is nothing to round.
        UnsupportedError: this processor or torch cannot compute with such weights.
    """
    if (why := why_not_quantized(weights)) is not None:
        raise UnsupportedError(f"weights={weights!r}, but {why}; leave weights out")
    fits = [(parent, name, child) for parent in module.modules() for name, child in parent.named_children()]
    count = 0
    for parent, name, child in fits:
        if type(child) is nn.Linear and _fits(child, weights):
            setattr(parent, name, QuantizedLinear(child, weights))
            count += 1
    if not count:
        raise ArgumentError(
            f"weights={weights!r}, but {type(module).__name__} has no linear layer on a CPU that can be rounded; "
            f"leave weights out"
        )
    return count


def _fits(linear: nn.Linear, weights: Weights) -> bool:
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    whole = linear.in_features % _GROUP == 0 and linear.out_features % _OUTPUTS == 0
    return linear.weight.is_cpu and not hooked and (weights == "int8" or whole)


@functools.cache
def why_not_quantized(weights: Weights) -> str | None:
    """Says why this processor cannot compute with such weights, None if it can; tried once per process."""
    seen = torch.backends.cpu.get_cpu_capability()
    if seen == "DEFAULT":
        return "torch has fast products with such weights for AVX2 and AVX-512 only, and this processor has neither"
    try:
        with torch.inference_mode():
            known = (torch.arange(32 * 64) % 7 - 3.0).view(32, 64)
            out = _KINDS[weights](known)(torch.eye(64, dtype=torch.bfloat16))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        message = str(error).partition("\n")[0]
        return f"torch {torch.__version__} cannot multiply {weights} weights on a processor with {seen}: {message}"
    if not torch.allclose(out.float(), known.T, atol=0.3):
        return f"torch {torch.__version__} multiplies {weights} weights wrongly on a processor with {seen}"
    return None
