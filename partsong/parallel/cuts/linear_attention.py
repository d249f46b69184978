"""Exchanges sums over tokens for linear attention, and border rows for its convolutions.

Linear attention reads keys and values only through one small matrix per head, a sum over all tokens. Every rank sums
its own, and the sums are added in rank order, so all ranks hold the same bits. The rest is local. Such networks often
have a depthwise convolution over the token grid as well, which needs the neighbours' border rows.
Both are exact and the same under every strategy that cuts tokens, since there is nothing large to send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, places
from partsong.parallel.hooks.call_hook import CallHook
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, original_forward, signature_of
from partsong.parallel.ranks.collectives import all_gather, halo_exchange
from partsong.parallel.ranks.mesh import Axis

__all__ = ["TokenSumHook", "TokenSums", "sum_over_ranks"]


class TokenSums:
    """Exchanges the token sums and border rows of one model.

    Args:
        axis: the ranks over which tokens are cut.
        adapter: the model's row, resolved.

    Attributes:
        samples: samples in the current call.
    """

    def __init__(self, axis: Axis, adapter: Adapter) -> None:
        self.axis, self.adapter = axis, adapter
        self.samples = 1
        self._sums: dict[tuple[str, torch.Size], Fraction] = {}
        self._borders: dict[str, int] = {}

    def begin_forward(self, samples: int) -> None:
        """Forgets what the last call exchanged."""
        self.samples = samples
        self._sums.clear()
        self._borders.clear()

    def call_notes(self) -> Any:
        """Returns what this call exchanged."""
        return self._sums.copy(), self._borders.copy()

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call by what `call_notes` returned after it."""
        self._sums, self._borders = (part.copy() for part in notes)

    def attach(self, hooks: HookSet, modules: Mapping[str, nn.Module]) -> int:
        """Puts hooks on linear attention and convolutions; returns how many linear attention modules there are."""
        count = 0
        for path, processor in self.adapter.linear_attention.items():
            for name in places(path, modules):
                _check_processor(name, modules[name], processor)
                hooks.add(modules[name], TokenSumHook(self._summed(name), name, _SUMS[processor]), "attention")
                count += 1
        for path in self.adapter.convolutions:
            for name in places(path, modules):
                run = self._with_borders(name, _halo(name, modules[name]))
                hooks.add(modules[name], AroundHook(run, signature_of(modules[name])), "borders")
        return count

    def _summed(self, name: str) -> Callable[[Tensor], Tensor]:
        def change(part: Tensor) -> Tensor:
            # Guidance may perturb the attention of some samples, which then have no sum.
            self._sums[name, part.shape[1:]] = Fraction(part.nbytes, self.samples)
            return sum_over_ranks(self.axis, part)

        return change

    def _with_borders(self, name: str, halo: int) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Tensor:
            own: Tensor = named["input"]  # [B, C, rows, width]
            self._borders[name] = own[0, :, :halo].nbytes
            batch, channels, rows, width = own.shape
            wide = own.new_zeros(batch, channels, rows + 2 * halo, width)
            wide[:, :, halo:-halo] = own
            halo_exchange(self.axis, wide, halo, 2, name="border rows").wait()
            return forward(input=wide)[:, :, halo:-halo]

        return run

    def predict(self, batch: int, index: int) -> int:
        """Returns the bytes the rank at `index` sends in one forward of `batch` samples."""
        neighbours = (index > 0) + (index < self.axis.size - 1)
        summed = int(batch * sum(self._sums.values()))
        return summed * (self.axis.size - 1) + batch * sum(self._borders.values()) * neighbours


def sum_over_ranks(axis: Axis, part: Tensor) -> Tensor:
    """Adds every rank's `part` in rank order, so that all ranks hold the same bits."""
    parts = part.new_empty((axis.size, *part.shape))
    parts[axis.index] = part
    all_gather(axis, parts, [1] * axis.size, name="sum over tokens").wait()
    return parts.sum(dim=0)


class TokenSumHook(CallHook):
    """Adds up over ranks the one product inside a module's forward that sums over tokens."""

    uncompiled = "new_forward"

    def __init__(self, summed: Callable[[Tensor], Tensor], name: str, sums: int = 1) -> None:
        super().__init__()
        self.summed, self.name, self.sums = summed, name, sums

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with its sum over tokens completed."""
        with _Products(self.summed, of_keys=self.sums > 1) as products:
            output = original_forward(self)(*args, **kwargs)
        if products.count != 2:
            raise UnsupportedError(
                f"{self.name} made {products.count} matrix products where linear attention makes two; use the "
                "model's default processor"
            )
        return output


class _Products(TorchFunctionMode):
    """Completes the first of linear attention's two matrix products, values by keys, which sums over tokens.

    Args:
        summed: completes a sum.
        of_keys: whether a sum of just the keys has to be completed as well.
    """

    def __init__(self, summed: Callable[[Tensor], Tensor], *, of_keys: bool) -> None:
        super().__init__()
        self.summed, self.of_keys, self.count = summed, of_keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.matmul:
            self.count += 1
            return self.summed(result) if self.count == 1 else result
        return self.summed(result) if func is Tensor.sum and self.of_keys else result


#: Number of sums over tokens of each processor: values by keys, and a separate one of keys where only keys are rotated.
_SUMS = {"SanaLinearAttnProcessor2_0": 1, "SanaLinearAttnProcessor3_0": 2}


def _check_processor(name: str, module: Any, processor: str) -> None:
    kind = type(module.processor)
    if processor not in [base.__name__ for base in kind.__mro__]:
        raise UnsupportedError(
            f"{name} has the processor {kind.__name__}; its linear attention is known with {processor} only"
        )


def _halo(name: str, convolution: Any) -> int:
    """Returns the width of the border a convolution needs; one that does not keep the grid is refused."""
    size = convolution.kernel_size[0]
    plain = convolution.stride == (1, 1) and convolution.dilation == (1, 1) and convolution.padding_mode == "zeros"
    if not plain or size % 2 == 0 or convolution.padding[0] != size // 2:
        raise UnsupportedError(f"{name}: {convolution} does not keep the token grid, so its rows cannot be cut")
    return size // 2
