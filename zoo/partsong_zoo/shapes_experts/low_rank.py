"""Changes linear layers by matrices of low rank: what an expert has learned beyond the model it began as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError

__all__ = ["LowRankChanges"]

#: Strength of the changes; divided by the root of the rank, so that a step of training moves any rank equally far.
STRENGTH = 4.0


class LowRankChanges(nn.Module):
    """Holds a change of low rank for every linear layer of a model's blocks.

    A layer gives W x + 4 / sqrt(rank) * B (A x). B begins at zero, so at first the model is what it was.

    Args:
        sizes: The linear layers by name, each with the sizes of what goes in and what comes out.
        rank: The rank of the changes.

    Source: LoRA, arXiv 2106.09685; the strength after rsLoRA, arXiv 2312.03732.

    >>> changes = LowRankChanges({"blocks.0.ff": (4, 6)}, rank=2)
    >>> sum(each.numel() for each in changes.parameters())
    20
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int]], *, rank: int) -> None:
        super().__init__()
        self.rank, self.strength = rank, STRENGTH * rank**-0.5
        # Names of parameters have no dots.
        shapes = {name.replace(".", "/"): size for name, size in sizes.items()}
        self.down = nn.ParameterDict({n: nn.Parameter(torch.randn(rank, a) * a**-0.5) for n, (a, _) in shapes.items()})
        self.up = nn.ParameterDict({n: nn.Parameter(torch.zeros(b, rank)) for n, (_, b) in shapes.items()})

    @classmethod
    def of(cls, transformer: nn.Module, *, rank: int) -> LowRankChanges:
        """Makes changes for the linear layers of a transformer's blocks."""
        layers = {name: each for name, each in transformer.named_modules() if isinstance(each, nn.Linear)}
        blocks = {name: each for name, each in layers.items() if name.startswith("transformer_blocks.")}
        return cls({name: (each.in_features, each.out_features) for name, each in blocks.items()}, rank=rank)

    @classmethod
    def read(cls, state: Mapping[str, Tensor]) -> LowRankChanges:
        """Makes changes from what `state_dict` returned."""
        downs = {name.removeprefix("down."): each for name, each in state.items() if name.startswith("down.")}
        sizes = {name.replace("/", "."): (each.shape[1], len(state[f"up.{name}"])) for name, each in downs.items()}
        changes = cls(sizes, rank=len(next(iter(downs.values()))))
        changes.load_state_dict({name: tensor.float() for name, tensor in state.items()})
        return changes

    @contextmanager
    def attached(self, transformer: nn.Module) -> Iterator[None]:
        """Lets the layers of a transformer compute with the changes inside."""
        handles = [
            transformer.get_submodule(name.replace("/", ".")).register_forward_hook(self._changing(name))
            for name in self.down
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _changing(self, name: str) -> Any:
        def change(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            low = nn.functional.linear(given[0], self.down[name])
            return output + self.strength * nn.functional.linear(low, self.up[name])

        return change

    @torch.no_grad()
    def merge(self, transformer: nn.Module) -> None:
        """Adds the changes to the weights of a transformer for good.

        Raises:
            ArgumentError: It has no layer of a name, or one of another size.
        """
        layers: dict[str, Any] = dict(transformer.named_modules())
        for name, down in self.down.items():
            path = name.replace("/", ".")
            layer = layers.get(path)
            change = self.strength * self.up[name] @ down
            if layer is None or layer.weight.shape != change.shape:
                raise ArgumentError(
                    f"there is no layer {path} of size {list(change.shape)} in this {type(transformer).__name__}; "
                    "give the model that the changes were trained on"
                )
            layer.weight += change.to(layer.weight)
