"""Passes gradients through shared work, where every rank computes the same loss from the same whole output.

A rank's part of the work gives a part of each gradient. They are added up in one message in the backward pass, so that
every rank has the gradients that one rank alone would have, of inputs and of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from partsong.parallel.ranks.agreement import check_alike
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.ranks.sums import sum_over

__all__ = ["gather_samples", "shared_call"]

Forward = Callable[..., Any]


def shared_call(
    axis: Axis, module: nn.Module, forward: Forward, named: dict[str, Any]
) -> tuple[Forward, dict[str, Any]]:
    """Prepares a call of which each rank computes a part: gradients of its weights and arguments are added up.

    Args:
        axis: the ranks.
        module: whose weights the call reads.
        forward: makes the call.
        named: its arguments, the same on all ranks.

    Returns:
        What to call, and the arguments to cut and call it with.
    """
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    inputs = [leaf for leaf in tree_leaves(named) if isinstance(leaf, Tensor) and leaf.requires_grad]
    shared = _Shared.apply(axis, *weights.values(), *inputs)
    own = {f"module.{name}": each for name, each in zip(weights, shared, strict=False)}
    replaced = dict(zip(map(id, inputs), shared[len(weights) :], strict=True))
    return (
        lambda **arguments: functional_call(_Call(module, forward), own, kwargs=arguments),
        tree_map(lambda leaf: replaced.get(id(leaf), leaf), named),
    )


class _Call(nn.Module):
    """Makes a call whose weights can be replaced, as `functional_call` does it."""

    def __init__(self, module: nn.Module, call: Forward) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, **named: Any) -> Any:
        return self.call(**named)


def gather_samples(axis: Axis, part: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the samples of all ranks; its gradient is this rank's samples of theirs.

    Args:
        axis: the ranks.
        part: this rank's samples.
        sizes: number of samples of each rank.

    Raises:
        ArgumentError: in the backward pass: ranks compute different losses.
    """
    if not part.requires_grad:
        return gather_tokens(axis, part, sizes, 0, name="gather of samples")
    return _Gathered.apply(axis, part, tuple(sizes))


class _Shared(Function):
    """Leaves tensors as they are, and adds up their gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor | None, ...]:
        totals: dict[int, Tensor] = {}
        for kind in dict.fromkeys(part.dtype for part in parts):
            places = [place for place, part in enumerate(parts) if part.dtype == kind]
            flat = torch.cat([parts[place].flatten() for place in places])
            summed = sum_over(ctx.axis, flat, name="sum of gradients").split([parts[place].numel() for place in places])
            totals |= {place: one.view(parts[place].shape) for place, one in zip(places, summed, strict=True)}
        return None, *(totals[place] for place in range(len(parts)))


class _Gathered(Function):
    """Gathers samples; the gradient of the whole is the same on all ranks, and each keeps that of its own samples."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, part: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return gather_tokens(axis, part, sizes, 0, name="gather of samples")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor | None, ...]:
        check_alike(ctx.axis, {"gradient of the output": whole}, advice="compute the same loss on every rank")
        index = ctx.axis.index
        return None, whole.narrow(0, offsets(ctx.sizes)[index], ctx.sizes[index]).clone(), None
