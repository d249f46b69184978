"""Predicts from shapes alone what a plan would move on ranks that need not exist."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from partsong.errors import ArgumentTypeError, UnsupportedError
from partsong.parallel.plan.explain import Explanation
from partsong.parallel.plan.plan import Plan
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.parallel.ranks.mesh import AXES, Axis, check_degrees, check_shares, shares_along
from partsong.parallel.strategy import Strategy, mesh_for

__all__ = ["DryMesh", "predict"]


class DryMesh:
    """Shows a mesh as one rank would see it: exchanges on its axes are counted and not made."""

    def __init__(
        self, degrees: dict[str, int], world_size: int, rank: int = 0, shares: Sequence[float] | None = None
    ) -> None:
        check_degrees(degrees, world_size)
        self.shares = check_shares(shares, world_size)
        self.degrees = {name: degrees[name] for name in AXES}
        self.world_size, self.rank = world_size, rank
        self.device, self.is_main = torch.device("meta"), rank == 0
        self._axes: dict[tuple[str, ...], Axis] = {}

    def axis(self, *names: str) -> Axis:
        """Returns one axis by name, or several flattened into one (outermost first)."""
        split = tuple(name for name in AXES if name in names and self.degrees[name] > 1)
        if split not in self._axes:
            grid = torch.arange(self.world_size).view(*self.degrees.values())
            mine = (grid == self.rank).nonzero()[0].tolist()
            line = grid[tuple(slice(None) if name in split else place for name, place in zip(AXES, mine, strict=True))]
            ranks = tuple(line.flatten().tolist())
            shares = shares_along(split, self.degrees, self.shares)
            self._axes[split] = Axis("*".join(split) or "alone", ranks, ranks.index(self.rank), dry=True, shares=shares)
        return self._axes[split]


def predict(
    module: nn.Module, *strategies: Strategy, ranks: int, shares: Sequence[float] | None = None, **inputs: Any
) -> Explanation:
    """Predicts the bytes a plan would move for one call of a denoiser, on any number of ranks.

    Args:
        module: a denoiser; only the shapes of its weights are used, so it may live on the ``meta`` device.
        *strategies: as for `parallelize`.
        ranks: number of ranks to predict for.
        shares: how fast each of them is, as for `Mesh`. Default: all alike.
        **inputs: the module's arguments for one call, full size; tensors on any device. Some models read values out of
            masks, ids or counts to know how long a sequence becomes; those count where they are given with values.

    Returns:
        The prediction for a generation long enough to reach the steady state: `Explanation.bytes_by_step` ends with a
        step in the middle of a generation.

    Raises:
        ArgumentTypeError: `module` is no module.
        ArgumentError: degrees and ranks do not fit, or the shares are wrong for them.
        UnsupportedError: the architecture or the combination has no correct parallel form, or the model's code needs
            more than shapes.

    Example:
        >>> from diffusers import DiTTransformer2DModel
        >>> from partsong import SyncPatch
        >>> model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1,
        ...     sample_size=8, num_embeds_ada_norm=10)
        >>> latents, labels = torch.zeros(1, 4, 8, 8), torch.zeros(1, dtype=torch.long)
        >>> inputs = {"hidden_states": latents, "timestep": labels, "class_labels": labels}
        >>> explanation = predict(model, SyncPatch(), ranks=2, **inputs)
        >>> len(explanation.bytes_per_step)
        2
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"predict() takes a denoiser module, not {type(module).__name__}")
    for strategy in strategies:
        if (reason := strategy.unpredictable()) is not None:
            raise UnsupportedError(f"predict(): {reason}")
    mesh: Any = DryMesh(mesh_for(strategies, ranks), ranks, shares=shares)
    # The middle of the generation is past the warm-up, past the first comparisons of inputs, and not the last step.
    steady = max(AGREED_STEPS, *(strategy.warmup_steps for strategy in strategies))
    steps = 2 * steady + 2
    named = tree_map(_without_numbers, inputs)
    with Plan(module, [module], strategies, mesh, owns_mesh=False) as plan, torch.no_grad():
        # Not the state dict: it leaves out tables that a model computes for itself.
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        state = {name: tensor.detach().to("meta") for name, tensor in tensors}
        plan.clock.driven = True
        plan.clock.begin(list(range(steps, 0, -1)))
        # One call tells the shapes of all, unless those after a warm-up are others.
        has_warmup = any(strategy.warmup_steps for strategy in strategies)
        for _ in range(steady + 1 if has_warmup else 1):
            _call(module, state, named)
            plan.clock.advance()
        return plan.explain()


def _without_numbers(value: Any) -> Any:
    """Returns a tensor that has a shape only; one of whole numbers or flags keeps the values it has."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return value.to("meta" if value.is_floating_point() or value.is_complex() else "cpu")


class _Values(TorchDispatchMode):
    """Lets tensors with values meet those that have a shape only, which the result then is as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            if func in _INDEXED:
                places = [_places(index) for index in args[1]]
                given = ((args[0], [place for several in places for place in several], *args[2:]), given[1])
            given = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, given)
        return func(*given[0], **given[1])


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the indices of what a mask names, whose number its values decide; other indices are left as they are."""
    return (index,) if index is None or index.dtype != torch.bool or index.is_meta else index.nonzero(as_tuple=True)


def _call(module: nn.Module, state: dict[str, Tensor], named: dict[str, Any]) -> None:
    has_values = any(isinstance(value, Tensor) and not value.is_meta for value in tree_leaves(named))
    try:
        with _Values() if has_values else nullcontext():
            torch.func.functional_call(module, state, kwargs=named)
    except (RuntimeError, ValueError) as problem:
        if isinstance(problem, ValueError) and "meta device" not in str(problem):
            raise  # not for want of values: the inputs are wrong, or the model is refused
        raise UnsupportedError(
            f"{type(module).__name__} does something that takes more than shapes ({problem}); make a call under a plan "
            "and ask its explain() instead"
        ) from problem
