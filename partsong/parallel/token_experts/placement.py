"""Puts experts that the same tokens choose on the same rank (the idea of ExFlow, arXiv 2401.08383)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.token_experts.layers import expert_layers

__all__ = ["hits", "measure_placement", "place", "read_placement"]


@torch.no_grad()
def measure_placement(model: Any, input_ids: Tensor, ranks: int, file: str | Path) -> dict[str, tuple[int, ...]]:
    """Reads texts and writes a file for `TokenExperts(placement=file)`, by which fewer results move.

    A token's result moves from every rank that has one of its experts. So experts that tokens choose together belong
    on one rank, which the file says for each layer.

    Args:
        model: a mixture of experts of transformers, on one rank.
        input_ids: typical texts `[B, T]`.
        ranks: how many ranks will share the experts.
        file: the JSON file to write: the experts of each layer, those of the first rank first.

    Returns:
        What the file says.

    Raises:
        UnsupportedError: the model has no experts that are known.
        ArgumentError: fewer experts than ranks.
    """
    chosen: dict[str, list[Tensor]] = {name: [] for name in expert_layers(model)}
    hooks = [
        layer.register_forward_pre_hook(lambda part, given, name=name: chosen[name].append(given[1].cpu()))
        for name, layer in expert_layers(model).items()
    ]
    try:
        model.base_model(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    counts = {name: int(layer.num_experts) for name, layer in expert_layers(model).items()}
    orders = {name: place(torch.cat(each), counts[name], ranks) for name, each in chosen.items()}
    Path(file).write_text(json.dumps({"ranks": ranks, "experts": orders}) + "\n", encoding="utf-8")
    return orders


def place(chosen: Tensor, experts: int, ranks: int) -> tuple[int, ...]:
    """Orders the experts of a layer, so that those of a rank follow each other and are often chosen together.

    A rank begins with the busiest expert that is left, takes what is chosen with its own most often, and then pairs of
    experts change places as long as that keeps more choices together.

    Args:
        chosen: experts of each token, `[tokens, k]`.
        experts: how many there are.
        ranks: how many share them.

    Raises:
        ArgumentError: fewer experts than ranks.

    >>> place(torch.tensor([[0, 3], [3, 0], [1, 2]]), 4, 2)
    (0, 3, 1, 2)
    """
    if experts < ranks:
        raise ArgumentError(f"{experts} experts cannot be placed on {ranks} ranks; use at most {experts}")
    asked = torch.nn.functional.one_hot(chosen, experts).sum(1).double()  # [tokens, experts]
    together = asked.T @ asked
    busy = together.diagonal().clone()
    together.fill_diagonal_(0.0)
    left, groups = set(range(experts)), list[list[int]]()
    for size in split_sizes(experts, ranks):
        group = [max(left, key=lambda each: (float(busy[each]), -each))]
        left -= {group[0]}
        while len(group) < size:
            group.append(max(left, key=lambda each: (float(together[each, group].sum()), -each)))
            left -= {group[-1]}
        groups.append(group)
    _swap(groups, together)
    return tuple(expert for group in groups for expert in sorted(group))


def _swap(groups: list[list[int]], together: Tensor) -> None:
    """Lets pairs of experts of two ranks change places while the best such pair keeps more choices together."""
    places = [(rank, place) for rank, group in enumerate(groups) for place in range(len(group))]
    while True:
        best, pair = 0.0, None
        for one, other in ((a, b) for a in places for b in places if a < b and a[0] != b[0]):
            first, second = groups[one[0]][one[1]], groups[other[0]][other[1]]
            gain = sum(
                float(
                    together[goes, groups[there]].sum() - together[goes, groups[here]].sum() - together[first, second]
                )
                for goes, here, there in ((first, one[0], other[0]), (second, other[0], one[0]))
            )
            if gain > best + 1e-9:
                best, pair = gain, (one, other)
        if pair is None:
            return
        (a, i), (b, j) = pair
        groups[a][i], groups[b][j] = groups[b][j], groups[a][i]


def hits(chosen: Tensor, order: Sequence[int], ranks: int) -> list[int]:
    """Counts the tokens of which each rank has an expert.

    >>> hits(torch.tensor([[0, 3], [3, 0], [1, 2]]), (0, 3, 1, 2), 2)
    [2, 1]
    """
    sizes = split_sizes(len(order), ranks)
    runs = [order[first : first + size] for first, size in zip(offsets(sizes), sizes, strict=True)]
    return [int(torch.isin(chosen, torch.tensor(run)).any(1).sum()) for run in runs]


def read_placement(file: str | None, layers: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Reads the order of each layer's experts; without a file they stay as they are.

    Raises:
        ArgumentError: the file cannot be read, or is of another model.
    """
    counts = {name: int(getattr(layer, "num_experts")) for name, layer in layers.items()}  # noqa: B009
    if file is None:
        return {name: tuple(range(count)) for name, count in counts.items()}
    try:
        orders = {name: tuple(order) for name, order in json.loads(Path(file).read_text("utf-8"))["experts"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
        raise ArgumentError(
            f"placement={file!r} cannot be read ({problem}); write it with measure_placement()"
        ) from problem
    if {name: sorted(order) for name, order in orders.items()} != {n: [*range(c)] for n, c in counts.items()}:
        raise ArgumentError(f"placement={file!r} is of another model; write one for this one with measure_placement()")
    return orders
