"""Finds the blocks of a model whose weights can be moved one after the other, each right before its call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter

__all__ = ["find_units", "own_weights", "refuse_packed"]


def find_units(
    module: nn.Module,
    adapter: Adapter,
    lent: Collection[nn.Module] = (),
    *,
    nested: bool = True,
    by: str = "ShardedWeights",
) -> list[nn.Module]:
    """Lists the blocks whose weights are moved one after the other, inner ones before those that hold them.

    Blocks of `lent` are left out: they are called while their model is not, so their weights stay where they are.

    Args:
        module: the model.
        adapter: its row.
        lent: modules that another part of the pipeline calls by itself.
        nested: whether blocks within the blocks of a UNet are listed too.
        by: name of the strategy that moves them, for the error.

    Raises:
        UnsupportedError: the model has no list of blocks.
    """
    # A transformer's blocks may call their own lists depending on the tokens, such as experts; a UNet's never do.
    deep = nested and bool(adapter.rows)
    called = [unit for unit in _units(module, deep=deep) if any(True for _ in unit.parameters())]
    units = [unit for unit in called if unit not in lent]
    if not units:
        raise UnsupportedError(
            f"{by} on {adapter.model}: found no list of blocks whose weights could be moved one after the other; drop "
            f"{by}"
        )
    return units


def _units(module: nn.Module, *, deep: bool) -> list[nn.Module]:
    inner: list[nn.Module] = []
    for child in module.children():
        blocks = [*child] if isinstance(child, nn.ModuleList) and all(map(_is_block, child)) else None
        for block in blocks or [child]:
            inner += _units(block, deep=deep) if blocks is None or deep else []
            inner += [block] if blocks else []
    return inner


def _is_block(module: nn.Module) -> bool:
    """Says whether a module is called and has two layers with weights: others are lists, or parts of a layer."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules()) > 1


def own_weights(
    module: nn.Module, units: Sequence[nn.Module], *, by: str, how: str
) -> dict[nn.Module, list[nn.Parameter]]:
    """Lists the weights of each block that neither an earlier block nor a layer outside of all blocks has.

    Args:
        module: the model.
        units: its blocks.
        by: name of the strategy that moves them, for the error.
        how: what is done to them, for the error.

    Raises:
        UnsupportedError: a weight is not a plain tensor.
    """
    inside = {part for unit in units for part in unit.modules()}
    outside = (part for part in module.modules() if part not in inside)
    seen = {weight for part in outside for weight in part.parameters(recurse=False)}
    owned = {}
    for unit in units:
        owned[unit] = [weight for weight in unit.parameters() if weight not in seen]
        seen.update(owned[unit])
    refuse_packed(module, (weight for own in owned.values() for weight in own), by=by, how=how)
    return owned


def refuse_packed(module: nn.Module, weights: Iterable[nn.Parameter], *, by: str, how: str) -> None:
    """Refuses weights that are not plain tensors, such as quantised ones.

    Raises:
        UnsupportedError: names the class of the weight.
    """
    for weight in weights:
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            raise UnsupportedError(
                f"{by} on {type(module).__name__}: weights of type {type(weight).__name__} cannot be {how}; load the "
                f"model without quantisation, or drop {by}"
            )
