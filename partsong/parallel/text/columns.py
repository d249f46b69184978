"""Holds one rank's columns of a language model's layers, and sums the ranks' partial results."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece, runs_of
from partsong.parallel.ranks.shards import split_sizes
from partsong.parallel.ranks.sums import sum_over, sum_sends
from partsong.parallel.tensor_parallel.low_rank import writers_of
from partsong.parallel.tensor_parallel.quantised_weights import check_layers, cut_weight
from partsong.parallel.text.parts import TextPart, WeightCut, find_text_parts
from partsong.parallel.text.stacks import stacks_of
from partsong.parallel.text.vocabulary import cut_vocabulary

__all__ = ["TextColumns"]

#: Attention that reads its numbers of heads from the configuration while it runs.
_READS_CONFIGURATION = ("Phi3Attention",)
#: Norms that multiply by their weight before they return to the type of their input.
_LATE = ("Olmo2RMSNorm",)


class TextColumns(TextShards):
    """Cuts the weights of a language model's parts into columns for each rank of an axis.

    Args:
        model: of transformers.
        axis: the ranks.

    Raises:
        UnsupportedError: no part is known, one has fewer units than ranks, or weights cannot be cut.
    """

    takes_several_stacks = True

    def __init__(self, model: Any, axis: Axis) -> None:
        check_layers(model)
        self.model, self.axis = model, axis
        self.parts = [*find_text_parts(model)]
        self._pieces: dict[tuple[nn.Module, str], WeightPiece] = {}
        self._cut_already: dict[int, tuple[Tensor, Tensor]] = {}
        narrow = next((part for part in self.parts if part.units < axis.size), None)
        if narrow is not None:
            what = "heads of keys" if narrow.kind == "attention" else "columns"
            raise UnsupportedError(
                f"TensorParallel on {type(model).__name__}: {narrow.name} has {narrow.units} {what} for {axis.size} "
                f"ranks; choose a degree of at most {narrow.units}, or use ShardedWeights"
            )

    def attach(self, hooks: HookSet) -> None:
        """Puts this rank's columns into the layers, and adds the sums after them."""
        for part in self.parts:
            for cut in part.cuts:
                self._cut(part, cut, hooks)
            for norm, unit in part.norms:
                vars(norm)["forward"] = partial(_normed, norm, part.units * unit, self.axis)
                hooks.on_remove(partial(vars(norm).pop, "forward"))
            if part.heads is not None:
                self._count(part, *part.heads, hooks)
            for layer in writers_of(part.summed) if self.axis.index > 0 else ():  # the first rank adds it, once
                if isinstance(bias := getattr(layer, "bias", None), Tensor):
                    hooks.put(layer, "bias", nn.Parameter(torch.zeros_like(bias), requires_grad=False))
                    self._pieces[layer, "bias"] = WeightPiece(0, ())
            hooks.on_remove(part.summed.register_forward_hook(self._sum).remove)
        self._cut_already.clear()
        self._pieces |= cut_vocabulary(self.model, self.axis, hooks)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which columns of a weight this rank holds; None where it holds all."""
        return self._pieces.get((part, name))

    def heads_here(self, heads: int) -> int:
        """Returns how many of a model's heads of keys this rank computes."""
        return split_sizes(heads, self.axis.size)[self.axis.index]

    def bytes_sent(self, tokens: int) -> int:
        """Returns the bytes that this rank sends in a forward of so many tokens, up to their hidden states.

        Where there are an encoder and a decoder it is what one of them sends.
        """
        width: int = self.model.config.get_text_config().hidden_size
        sends = sum_sends(tokens * width, self.axis.size, self.axis.index) * self.model.dtype.itemsize
        return (len(self.parts) // len(stacks_of(self.model)) + 1) * sends  # and the embeddings

    def describe(self) -> str:
        """Says in words what is shared out."""
        counts = Counter(part.kind for part in self.parts)
        return f"the columns of {' and '.join(f'{count} {kind}' for kind, count in counts.items())} layers"

    def _cut(self, part: TextPart, cut: WeightCut, hooks: HookSet) -> None:
        runs = runs_of(cut.pieces, self.axis.size, self.axis.index)
        layer: Any = cut.layer
        weight = getattr(layer, cut.name)
        if id(weight) not in self._cut_already:  # an encoder and a decoder may have it in common
            self._cut_already[id(weight)] = weight, cut_weight(weight, runs, cut.dim, part.name)
        hooks.put(layer, cut.name, self._cut_already[id(weight)][1])
        self._pieces[layer, cut.name] = WeightPiece(cut.dim, runs)
        if isinstance(layer, nn.Linear) and cut.name == "weight":
            hooks.put(layer, ("out_features", "in_features")[cut.dim], sum(count for _, count in runs))

    def _count(self, part: TextPart, attention: Any, heads: int, hooks: HookSet) -> None:
        """Lets an attention count this rank's heads, in attributes and in the configuration it reads while it runs."""
        keys = split_sizes(part.units, self.axis.size)[self.axis.index]
        counts = {"num_attention_heads": heads // part.units * keys, "num_key_value_heads": keys}
        for name, count in counts.items():
            if hasattr(attention, name):
                hooks.put(attention, name, count)
        if type(attention).__name__ in _READS_CONFIGURATION:
            config = copy.copy(attention.config)
            vars(config).update(counts)
            hooks.put(attention, "config", config)

    def _sum(self, layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        return sum_over(self.axis, output, name="sum of columns")


def _normed(norm: Any, width: int, axis: Axis, x: Tensor) -> Tensor:
    """Divides by the root mean square of the columns of all ranks, as transformers' norms do in single precision."""
    working = x.float()
    power = sum_over(axis, working.square().sum(-1, keepdim=True), name="sum of squares") / width
    scaled = working * torch.rsqrt(power + norm.variance_epsilon)
    if type(norm).__name__ in _LATE:
        return (norm.weight * scaled).to(x.dtype)
    return norm.weight * scaled.to(x.dtype)
