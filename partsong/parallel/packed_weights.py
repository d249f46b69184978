"""Multiplies by copies of weights that lie in oneDNN's own order, so that a CPU need not reorder them in every call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.hooks.known_values import place_for_memory
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.strategy import Site, Strategy

__all__ = ["PackedWeights"]

#: Fewest numbers of a weight that is packed: reordering a smaller one takes no time beside the rest of a call.
_FEWEST = 1 << 16
#: Rows that a weight is packed for; it serves any others.
_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeights(Strategy):
    """Keeps copies of the weights of large layers in the order that a CPU multiplies in. Exact up to rounding.

    Linear layers and convolutions in float32 reorder their weights in every call otherwise. That takes as long for a
    rank's few rows as for a whole picture, so ranks gain more than one process. Each generation packs
    them anew, and so does a write to a weight in between. The copies take as much memory as the weights.

    Use it when a float32 model runs on CPUs that have the memory.

    Example:
        >>> PackedWeights().kind
        'exact'
    """

    keeps_layers: ClassVar[bool] = True

    def composes(self, other: Strategy) -> bool:
        """Says that it runs beside strategies whose weights stay where they are."""
        return not (other.has_loop or other.offloads or (other.cuts_weights and other.uses_all_ranks))

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses processors, or builds of torch, without the operators that it needs."""
        if not torch.backends.mkldnn.is_available():
            return f"torch {torch.__version__} was built without oneDNN; leave it out"
        return None

    def attach(self, denoiser: Site, hooks: HookSet) -> None:
        """Puts the hook on the model that lets its layers multiply by packed weights.

        Raises:
            UnsupportedError: the model is on another device than a CPU, or torch lacks the operators.
        """
        name = denoiser.adapter.model
        if (reason := self.refuses(denoiser.adapter)) is not None:
            raise UnsupportedError(f"PackedWeights on {name}: {reason}")
        if any(weight.device.type not in ("cpu", "meta") for weight in denoiser.module.parameters()):
            raise UnsupportedError(
                f"PackedWeights on {name}: it is for CPUs, whose layers reorder weights; leave it out"
            )
        packed = _Packed()

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            with packed:
                return forward(**named)

        hooks.add(denoiser.module, AroundHook(run, signature_of(denoiser.module)), "packed")
        # What merges a LoRA writes past a weight's count of writes, between generations.
        denoiser.clock.on_begin(packed.copies.clear)
        hooks.on_remove(packed.copies.clear)


class _Packed(TorchFunctionMode):
    """Computes products and convolutions by packed copies of their weights.

    Attributes:
        copies: by the memory and version of a weight, that memory, which stays alive so that it is not used for
            another, and the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Hashable, tuple[Tensor, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs:
            return self._multiply(*args)
        if func is F.conv2d and not kwargs:
            return self._convolve(*args)
        return func(*args, **(kwargs or {}))

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not (_is_packable(weight, 2) and x.dtype == torch.float32):
            return F.linear(x, weight, bias)
        packed = self._copy_of(weight, lambda: torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS))
        if weight.is_meta:
            return F.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any) -> Tensor:
        stride, padding, dilation, groups = (*settings, *(1, 0, 1, 1)[len(settings) :])
        sides = [_pair(each) for each in (padding, stride, dilation)]
        # Convolutions of one position are plain products, which lose by it.
        is_known = groups == 1 and None not in sides and weight.ndim == 4 and max(weight.shape[2:]) > 1
        if not is_known or x.ndim != 4 or x.dtype != torch.float32 or not _is_packable(weight, 4):
            return F.conv2d(x, weight, bias, *settings)
        shape = list(x.shape)  # the order suits the first picture, and serves others
        reorder = torch._C._nn.mkldnn_reorder_conv2d_weight  # type: ignore[attr-defined]
        packed = self._copy_of(weight, lambda: reorder(weight.detach().to_mkldnn(), *sides, 1, shape))
        if weight.is_meta:
            return F.conv2d(x, weight, bias, *settings)
        return torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *sides, 1, "none", [], "")

    def _copy_of(self, weight: Tensor, pack: Callable[[], Any]) -> Any:
        """Returns the packed copy of a weight, made where there is none of its present values."""
        place = place_for_memory(weight)
        if place not in self.copies:
            # A weight without values, as forecasts have them, gets a copy that counts as memory.
            self.copies[place] = weight.detach(), torch.empty_like(weight) if weight.is_meta else pack()
        return self.copies[place][1]


def _is_packable(weight: Any, dims: int) -> bool:
    return (
        type(weight) in (Tensor, torch.nn.Parameter)
        and weight.ndim == dims
        and weight.dtype == torch.float32
        and (weight.is_cpu or weight.is_meta)
        and weight.numel() >= _FEWEST
        and not weight.is_inference()
        and not torch.is_grad_enabled()
    )


def _pair(side: Any) -> list[int] | None:
    """Returns both sides of a setting of a convolution; None for a padding that is named."""
    if isinstance(side, int):
        return [side, side]
    return None if isinstance(side, str) else list(side)
