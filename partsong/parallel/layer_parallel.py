"""Lets the attentions of several layers of a decoder start from the same state, each on a rank of its own.

Neighbouring layers see nearly the same state, so a draft model may compute the attentions of a few layers at once
(EasySpec, arXiv 2502.02493). The result approximates the model's output, for drafts that are verified. The
feed-forward parts stay sequential, on every rank. The keys of a layer are only on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.replaced_method import ReplacedMethods
from partsong.parallel.ranks.collectives import all_gather, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import split_sizes

__all__ = ["LayerParallel", "layer_groups"]

#: Decoders whose layers add the attention of the normed state and then the feed-forward part of the normed state.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def layer_groups(num_layers: int, size: int) -> tuple[range, ...]:
    """Returns the groups of layers whose attentions start together; the first and last are groups of one.

    >>> layer_groups(7, 2)
    (range(0, 1), range(1, 3), range(3, 5), range(5, 6), range(6, 7))
    """
    inner = range(1, max(num_layers - 1, 1))
    groups = [inner[start : start + size] for start in range(0, len(inner), size)]
    return (range(1), *groups, *([range(num_layers - 1, num_layers)] if num_layers > 1 else []))


class LayerParallel:
    """Runs a decoder's layers in groups until `undo`.

    Every rank of the axis makes the same calls of the model, with the same tokens.

    Args:
        module: a causal language model of transformers, of a family such as llama whose layers add their attention and
            then their feed-forward part.
        size: how many layers' attentions start from the same state; 1 computes the model exactly, spread over the
            ranks.
        axis: the ranks.

    Raises:
        UnsupportedError: the model's layers are of another kind, or a plan is on them already.
    """

    def __init__(self, module: nn.Module, size: int, axis: Axis) -> None:
        config: Any = module.config
        if config.model_type not in _KNOWN:
            raise UnsupportedError(
                f"layers of {config.model_type!r} cannot be grouped; this was tested for {', '.join(_KNOWN)}"
            )
        self.layers: Sequence[Any] = module.model.layers  # type: ignore[union-attr]
        self.axis, self._exact = axis, False
        self.groups = layer_groups(len(self.layers), size)
        self._group_of = {number: group for group in self.groups for number in group}
        self._ahead: dict[int, Tensor] = {}
        self._replaced = ReplacedMethods()
        for number, layer in enumerate(self.layers):
            self._replaced.replace(layer, "forward", lambda forward, number=number: partial(self._run, number))

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Runs the layers one after the other, as the model does without groups."""
        self._exact = True
        try:
            yield
        finally:
            self._exact = False

    def undo(self) -> None:
        """Restores the layers' own forward."""
        self._replaced.restore()

    def owner(self, number: int) -> int:
        """Returns the index of the rank that computes a layer's attention and has its keys."""
        group = self._group_of[number]
        if len(group) == 1:
            return number % self.axis.size
        begin = number - group[0]
        for rank, count in enumerate(split_sizes(len(group), self.axis.size)):
            if begin < count:
                return rank
            begin -= count
        raise AssertionError(f"layer {number} is in no share of its group")

    def bytes_sent(self, tokens: int, hidden_size: int, itemsize: int) -> int:
        """Predicts the bytes that this rank sends in a forward, in groups or not.

        Args:
            tokens: how many tokens.
            hidden_size: width of a state.
            itemsize: bytes of a number.
        """
        own = sum(self.owner(number) == self.axis.index for number in range(len(self.layers)))
        return own * (self.axis.size - 1) * tokens * hidden_size * itemsize

    def _run(self, number: int, hidden_states: Tensor, **named: Any) -> Tensor:
        layer, group = self.layers[number], self._group_of[number]
        if self._exact or len(group) == 1:
            attended = self._attended(number, hidden_states, named)
        else:
            if number == group[0]:
                self._ahead = self._attended_together(group, hidden_states, named)
            attended = self._ahead.pop(number)
        hidden_states = hidden_states + attended
        return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

    def _attend(self, number: int, hidden_states: Tensor, named: dict[str, Any]) -> Tensor:
        layer = self.layers[number]
        return layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **named)[0].contiguous()

    def _attended(self, number: int, hidden_states: Tensor, named: dict[str, Any]) -> Tensor:
        """Computes a layer's attention on its owner, which sends it to the others."""
        axis, owner = self.axis, self.owner(number)
        if axis.index != owner:
            result = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
            exchange(axis, {}, {owner: result}, name="attention of a layer").wait()
            return result
        result = self._attend(number, hidden_states, named)
        others = {peer: result for peer in range(axis.size) if peer != owner}
        exchange(axis, others, {}, name="attention of a layer").wait()
        return result

    def _attended_together(self, group: range, hidden_states: Tensor, named: dict[str, Any]) -> dict[int, Tensor]:
        """Computes the attentions of a group, each from the state before it, and gathers them."""
        whole = hidden_states.new_empty(len(group), *hidden_states.shape)
        for place, number in enumerate(group):
            if self.owner(number) == self.axis.index:
                whole[place] = self._attend(number, hidden_states, named)
        all_gather(self.axis, whole, split_sizes(len(group), self.axis.size), name="attentions of a group").wait()
        return {number: whole[place] for place, number in enumerate(group)}
