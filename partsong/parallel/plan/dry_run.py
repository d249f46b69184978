"""Makes calls of a denoiser on one of many ranks that need not exist, with tensors that have shapes only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from partsong.errors import ArgumentTypeError, UnsupportedError
from partsong.kernels.merge import fused_without_values
from partsong.parallel.plan.plan import Plan
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.parallel.ranks.axes import AXES, check_shares, shares_along
from partsong.parallel.ranks.mesh import Axis, Network, check_degrees
from partsong.parallel.strategy import Strategy, mesh_for

__all__ = ["DryMesh", "DryRun", "MixedValues", "FusedAttention", "without_numbers"]


class DryMesh:
    """Shows a mesh as one rank would see it: exchanges on its axes are counted and not made.

    Args:
        degrees: ranks on each axis.
        world_size: their product.
        rank: whose view it is.
        network: is notified of every message; None for nobody.
        shares: relative speed of each rank. Default: all equal.
        fused: whether ranks have a library that moves all parts of a tensor in one operation, as GPUs do.
    """

    def __init__(
        self,
        degrees: Mapping[str, int],
        world_size: int,
        rank: int = 0,
        network: Network | None = None,
        shares: Sequence[float] | None = None,
        *,
        fused: bool = False,
    ) -> None:
        check_degrees(degrees, world_size)
        self.shares = check_shares(shares, world_size)
        self.degrees = {name: degrees[name] for name in AXES}
        self.world_size, self.rank, self.network = world_size, rank, network
        self.device, self.is_main, self.fused = torch.device("meta"), rank == 0, fused
        self._axes: dict[tuple[str, ...], Axis] = {}

    def axis(self, *names: str) -> Axis:
        """Returns one axis by name, or several flattened into one (outermost first)."""
        split = tuple(name for name in AXES if name in names and self.degrees[name] > 1)
        if split not in self._axes:
            grid = torch.arange(self.world_size).view(*self.degrees.values())
            mine = (grid == self.rank).nonzero()[0].tolist()
            line = grid[tuple(slice(None) if name in split else place for name, place in zip(AXES, mine, strict=True))]
            ranks = tuple(line.flatten().tolist())
            shares, name = shares_along(split, self.degrees, self.shares), "*".join(split) or "alone"
            index = ranks.index(self.rank)
            dry: dict[str, Any] = {"dry": True, "network": self.network, "is_fused": self.fused and len(ranks) > 1}
            self._axes[split] = Axis(name, ranks, index, shares=shares, **dry)
        return self._axes[split]

    def lane(self, *names: str) -> Axis:
        """Returns an axis of the same ranks whose messages do not queue with its other ones, where `Mesh` makes one."""
        axis = self.axis(*names)
        return replace(axis, lane="bulk") if axis.is_fused else axis

    def abandon(self) -> None:
        """Does nothing: no rank waits for what was only counted."""


class DryRun:
    """Makes calls of a denoiser under a plan, as one rank would in the middle of a long generation.

    Use it as a context manager: it undoes the plan.

    Args:
        module: a denoiser; only the shapes of its weights are used.
        strategies: as for `parallelize`.
        ranks: how many there are.
        inputs: the module's arguments for one call, full size.
        rank: whose calls are made.
        network: is notified of every message; None for nobody.
        shares: relative speed of each rank. Default: all equal.
        shapes: memory of earlier runs; None starts without.
        fused: whether the ranks are GPUs: messages and results of attention are then put together in one operation.

    Attributes:
        plan: the plan.
        calls: how many calls to make until one is like all later ones.
        warmup: how many calls differ from those after them.
        state: the weights and tables of the module on this rank, without values.

    Raises:
        ArgumentTypeError: `module` is not a module.
        ArgumentError: degrees and ranks do not fit, or the shares are wrong for them.
        UnsupportedError: the architecture or the combination has no correct parallel form, shapes alone do not decide
            what is moved, or the model's code needs more than shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        strategies: Sequence[Strategy],
        ranks: int,
        inputs: Mapping[str, Any],
        *,
        rank: int = 0,
        network: Network | None = None,
        shares: Sequence[float] | None = None,
        shapes: RememberedShapes | None = None,
        fused: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(f"predict() takes a denoiser module, not {type(module).__name__}")
        for strategy in strategies:
            if (reason := strategy.unpredictable()) is not None:
                raise UnsupportedError(f"predict(): {reason}")
        mesh: Any = DryMesh(mesh_for(strategies, ranks), ranks, rank, network, shares, fused=fused)
        # The middle of the generation is past the warm-up, past the first comparisons of inputs, and not the last step.
        self.warmup = max([0, *(strategy.warmup_steps for strategy in strategies)])
        steady = max(AGREED_STEPS, self.warmup)
        self.module, self.inputs = module, tree_map(without_numbers, dict(inputs))
        # One call shows the shapes of all, unless they change after a warm-up.
        self.calls = steady + 1 if self.warmup else 1
        self.plan = Plan(module, [module], tuple(strategies), mesh, owns_mesh=False)
        # Not the state dict: it leaves out tables that a model computes for itself.
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        self.state = {name: tensor.detach().to("meta") for name, tensor in tensors}
        self._shapes = RememberedShapes() if shapes is None else shapes
        self._merging = fused_without_values if fused else nullcontext
        self.plan.clock.driven = True
        self.plan.clock.begin(list(range(2 * steady + 2, 0, -1)))

    def call(self) -> Any:
        """Makes the next step's call, and returns the module's output, without values."""
        has_values = any(isinstance(value, Tensor) and not value.is_meta for value in tree_leaves(self.inputs))
        try:
            with torch.no_grad(), self._merging(), MixedValues() if has_values else nullcontext(), FusedAttention():
                output = torch.func.functional_call(self.module, self.state, kwargs=self.inputs)
        except (RuntimeError, ValueError) as problem:
            if isinstance(problem, ValueError) and "meta device" not in str(problem):
                raise  # not for lack of values: the inputs are wrong, or the model is refused
            raise UnsupportedError(
                f"{type(self.module).__name__} does something that takes more than shapes ({problem}); make a call "
                "under a plan and ask its explain() instead"
            ) from problem
        self.plan.clock.advance()
        return output

    def weight_bytes(self) -> int:
        """Returns the bytes of the weights that stay on this rank."""
        shards = self.plan.denoisers[0].shards
        whole = sum(weight.nbytes for weight in self.module.parameters())
        return whole if shards is None else whole - shards.spared()

    def __enter__(self) -> DryRun:
        self._shapes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shapes.__exit__(kind, error, trace)
        self.plan.__exit__(kind, error, trace)


def without_numbers(value: Any) -> Any:
    """Returns a tensor without values; integers and booleans keep theirs."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return value.to("meta" if value.is_floating_point() or value.is_complex() else "cpu")


class MixedValues(TorchDispatchMode):
    """Lets operators combine tensors with and without values; the result then has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            if func in _INDEXED:
                places = [_places(index) for index in args[1]]
                given = ((args[0], [place for several in places for place in several], *args[2:]), given[1])
            given = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, given)
        return func(*given[0], **given[1])


class FusedAttention(TorchFunctionMode):
    """Keeps attention one operator, as on real devices: on meta tensors torch would create all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not (query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1]):
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the indices that a mask selects, whose number depends on its values; leaves other indices unchanged."""
    return (index,) if index is None or index.dtype != torch.bool or index.is_meta else index.nonzero(as_tuple=True)
