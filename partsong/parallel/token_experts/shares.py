"""Runs a rank's experts on the tokens that chose them, and gives every rank the sum of all experts' results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.collectives import exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.ranks.sums import sum_over, sum_sends
from partsong.parallel.tensor_parallel.quantised_weights import check_layers
from partsong.parallel.text.vocabulary import cut_vocabulary

__all__ = ["PlacedTokenExperts", "sends_results"]


def sends_results(hits: list[int], tokens: int) -> bool:
    """Says whether ranks send the results of the tokens they have experts of, rather than add up those of all tokens.

    Args:
        hits: tokens of which each rank has an expert.
        tokens: how many there are.
    """
    size = len(hits)
    return max(hits) * (size - 1) <= min(sum_sends(tokens, size, index) for index in range(size))


@dataclass(slots=True)
class _Call:
    """Describes the tokens of a call of a layer.

    Attributes:
        tokens: how many there are.
        rows: the tokens of which each rank has an expert, in rising order.
        pairs: the place among its rows of each pair of a token and an expert that this rank computes.
    """

    tokens: int
    rows: list[Tensor]
    pairs: Tensor


@dataclass(slots=True)
class _Layer:
    """Holds what one layer of experts needs.

    Attributes:
        owners: the rank of each expert, int64 `[experts]`.
        places: its place among the experts of that rank.
        call: the call that is running.
    """

    owners: Tensor
    places: Tensor
    call: _Call | None = None


class PlacedTokenExperts(TextShards):
    """Leaves each rank some experts of every layer.

    All ranks have all tokens and the same router, so they know who computes what without asking. A rank runs its
    experts on the tokens that chose them. Then each sends the results of these tokens to all others, which add them up
    in the order of ranks; where adding up all tokens moves less, they do that.

    Args:
        model: of transformers.
        axis: the ranks.
        layers: its layers of experts by name.
        orders: the experts of each, those of the first rank first.
    """

    def __init__(
        self, model: Any, axis: Axis, layers: Mapping[str, Any], orders: Mapping[str, tuple[int, ...]]
    ) -> None:
        check_layers(model)
        self.model, self.axis, self._layers, self._orders = model, axis, layers, orders
        self._pieces: dict[tuple[nn.Module, str], WeightPiece] = {}

    def attach(self, hooks: HookSet) -> None:
        """Leaves this rank's experts in the layers, and its tokens in the vocabulary."""
        for name, layer in self._layers.items():
            order = self._orders[name]
            sizes = split_sizes(len(order), self.axis.size)
            first = offsets(sizes)[self.axis.index]
            mine = order[first : first + sizes[self.axis.index]]
            for key, weight in [*layer.named_parameters(recurse=False)]:
                # Experts that follow each other are a view of the whole.
                run = range(mine[0], mine[0] + len(mine))
                kept = weight.detach()[run.start : run.stop] if tuple(run) == mine else weight.detach()[list(mine)]
                hooks.put(layer, key, nn.Parameter(kept, requires_grad=False))
                self._pieces[layer, key] = WeightPiece(0, tuple((expert, 1) for expert in mine))
            hooks.put(layer, "num_experts", len(mine))
            owners, places = torch.empty(2, len(order), dtype=torch.int64).unbind()
            ranks = torch.tensor(range(len(sizes))).repeat_interleave(torch.tensor(sizes))
            owners[list(order)] = ranks
            places[list(order)] = torch.arange(len(order)) - torch.tensor(offsets(sizes))[ranks]
            state = _Layer(owners, places)
            for hook in (
                layer.register_forward_pre_hook(partial(self._pick, state), with_kwargs=True),
                layer.register_forward_hook(partial(self._join, state)),
            ):
                hooks.on_remove(hook.remove)
        self._pieces |= cut_vocabulary(self.model, self.axis, hooks)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which part of a weight this rank holds; None where it holds all."""
        return self._pieces.get((part, name))

    def describe(self) -> str:
        """Says in words what is shared out."""
        counts = sorted({len(order) for order in self._orders.values()})
        return f"{' or '.join(map(str, counts))} experts of {len(self._orders)} layers, and the vocabulary"

    def _pick(self, state: _Layer, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Puts this rank's pairs of a token and an expert in the place of all tokens with all their experts."""
        state.call = None
        if self.axis.dry:  # where tokens go takes values: as many bytes as it can be
            return None
        states, chosen, weights = (*given, *named.values())
        if state.owners.device != chosen.device:
            state.owners, state.places = state.owners.to(chosen.device), state.places.to(chosen.device)
        owners = state.owners[chosen]
        rows = [(owners == rank).any(1).nonzero()[:, 0] for rank in range(self.axis.size)]
        token, slot = (owners == self.axis.index).nonzero(as_tuple=True)
        state.call = _Call(len(states), rows, torch.searchsorted(rows[self.axis.index], token))
        if not len(token):  # a result that is not used
            return (states[:1], torch.zeros_like(chosen[:1, :1]), torch.zeros_like(weights[:1, :1])), {}
        return (states[token], state.places[chosen[token, slot]][:, None], weights[token, slot][:, None]), {}

    def _join(self, state: _Layer, layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        axis, call = self.axis, state.call
        if call is None:
            return sum_over(axis, output, name="sum of experts")
        mine = output.new_zeros(len(call.rows[axis.index]), output.shape[1])
        if len(call.pairs):
            mine.index_add_(0, call.pairs, output)
        whole = output.new_zeros(call.tokens, output.shape[1])
        if not sends_results([len(rows) for rows in call.rows], call.tokens):
            whole[call.rows[axis.index]] = mine
            return sum_over(axis, whole, name="sum of experts")
        others = [peer for peer in range(axis.size) if peer != axis.index]
        parts = {peer: output.new_empty(len(call.rows[peer]), output.shape[1]) for peer in others}
        exchange(axis, dict.fromkeys(others, mine), parts, name="results of experts").wait()
        parts[axis.index] = mine
        for rank in range(axis.size):
            whole[call.rows[rank]] += parts[rank]
        return whole
