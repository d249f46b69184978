"""Multiplies a few rows with a weight at the speed of the memory, without a copy of the weight.

A step of decoding multiplies one row, or a few, by every weight of a model. For so few rows the library behind torch's
products uses a special routine, which on a CPU reads the weight at little more than half the memory's speed. Handed
to it as two halves in one batched product, transposed, the weight is read at full speed: for one row in 0.6 of the
time, for two in 0.4, with AVX2 and with AVX-512, in float32 and float64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FewRowsLinear", "few_rows_product", "with_few_rows"]

#: With more rows than this, halves gain nothing over the plain product.
_ROWS = 4
#: A smaller weight stays in the cache, and what counts is the number of calls.
_LEAST = 1 << 16
_DTYPES = (torch.float32, torch.float64)


def few_rows_product(x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x @ weight.T`` for a few rows `[N, C]`; a weight `[V, C]` with V even is read in two halves.

    >>> few_rows_product(torch.ones(1, 3), torch.ones(4, 3)).tolist()
    [[3.0, 3.0, 3.0, 3.0]]
    """
    if len(weight) % 2 or not weight.is_contiguous():
        return (weight @ x.T).T.contiguous()
    halves = weight.view(2, -1, weight.shape[1])
    return torch.bmm(halves, x.T.expand(2, -1, -1)).view(len(weight), len(x)).T.contiguous()


class FewRowsLinear(nn.Module):
    """Computes what an `nn.Linear` does, quickly for a few rows; inference only.

    Args:
        linear: whose weight and bias are used, not copied. It is not changed.

    >>> linear = nn.Linear(4, 6)
    >>> x = torch.ones(1, 1, 4)
    >>> bool(torch.allclose(FewRowsLinear(linear)(x), linear(x), atol=1e-6))
    True
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Attributes, not parameters: registering them again in every copy of the module costs more than a small model.
        self.weight: Any = linear.weight.detach()
        self.bias: Any = None if linear.bias is None else linear.bias.detach()
        self.halves = self.weight.view(2, -1, self.weight.shape[1])
        self.half_bias = None if self.bias is None else self.bias.view(2, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        out_features, in_features = self.weight.shape
        rows = x.numel() // in_features
        if not 0 < rows <= _ROWS or x.dtype is not self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        columns = x.reshape(rows, in_features).T.expand(2, -1, -1)
        if self.half_bias is None:
            out = torch.bmm(self.halves, columns)
        else:
            out = torch.baddbmm(self.half_bias, self.halves, columns)
        if rows > 1:
            out = out.view(out_features, rows).T.contiguous()
        return out.view(*x.shape[:-1], out_features)


def with_few_rows(module: nn.Module) -> nn.Module:
    """Returns a second tree of a module's parts in which large linear layers are quick for a few rows.

    Everything else is shared: weights, buffers, hooks, and all parts that hold no such layer. The module itself is not
    changed. Subclasses of `nn.Linear`, which do something of their own, are left alone, and so are layers with hooks.

    >>> with_few_rows(nn.Linear(8, 8)).__class__.__name__
    'Linear'
    """
    return _copy(module, {})


def _copy(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    if isinstance(module, nn.Linear) and _is_slow(module):
        copy: nn.Module = FewRowsLinear(module)
    else:
        parts = {name: None if part is None else _copy(part, copies) for name, part in module._modules.items()}
        copy = module
        if any(parts[name] is not part for name, part in module._modules.items()):
            copy = object.__new__(type(module))
            copy.__dict__ = {**module.__dict__, "_modules": parts}
    copies[id(module)] = copy
    return copy


def _is_slow(module: nn.Linear) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    # Layers with a forward of their own on the instance (offloading adds one) or a special tensor are left alone.
    plain = "forward" not in module.__dict__ and type(weight) is nn.Parameter and type(weight.data) is Tensor
    fits = weight.is_cpu and weight.dtype in _DTYPES and weight.is_contiguous() and weight.numel() >= _LEAST
    return plain and fits and len(weight) % 2 == 0
