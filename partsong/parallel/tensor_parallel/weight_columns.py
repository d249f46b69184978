"""Holds one rank's columns of every part that is shared out, and sums the ranks' partial results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import IMAGE, JOINT, TEXT
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.protocols import Cut, Shards
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece, runs_of
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.ranks.sums import sum_over, sum_sends
from partsong.parallel.tensor_parallel.low_rank import readers_of, writers_of
from partsong.parallel.tensor_parallel.parts import Columns, HeadTurns, Part
from partsong.parallel.tensor_parallel.quantised_weights import cut_weight

__all__ = ["WeightColumns"]


@dataclass(frozen=True, slots=True)
class Sum:
    """Describes sums of one size over ranks.

    Attributes:
        tokens: tokens of every rank that holds a share of them; empty where all tokens are local.
        per_sample: numbers in a sample, or, where tokens are shared out, in a token of it.
        itemsize: bytes of a number.
    """

    tokens: tuple[int, ...]
    per_sample: Fraction
    itemsize: int


class WeightColumns(Shards):
    """Cuts the weights of a model's parts into columns for each rank of an axis.

    Args:
        adapter: the model's row.
        parts: what is shared out.
        axis: the ranks.
        has_tokens: whether the tokens are cut over other ranks.

    Raises:
        UnsupportedError: the model has no such part, or one with fewer heads or columns than ranks, or quantised
            weights that cannot be cut.
    """

    axes = ("tensor",)
    stays_cut = True

    def __init__(self, adapter: Adapter, parts: tuple[Part, ...], axis: Axis, has_tokens: bool) -> None:
        self.adapter, self.axis = adapter, axis
        if not parts:
            raise UnsupportedError(
                f"TensorParallel on {adapter.model}: found no attention or feed-forward layer whose columns it "
                "knows how to cut; use CfgParallel"
            )
        # Parts with fewer heads, such as those that prepare the text, stay whole.
        widest = max(parts, key=lambda part: (bool(part.counts), part.most))
        if widest.most < axis.size:
            raise UnsupportedError(
                f"TensorParallel on {adapter.model}: {widest.name} has {widest.most} heads (or groups of heads that "
                f"read the same keys) for {axis.size} ranks; choose a degree of at most {widest.most}"
            )
        self.parts = tuple(part for part in parts if part.most >= axis.size)
        uneven = [part for part in self.parts if part.counts and part.last[0].pieces[0][0] % axis.size]
        if has_tokens and uneven:
            raise UnsupportedError(
                f"TensorParallel on {adapter.model}: the {uneven[0].most} heads of {uneven[0].name} do not divide by "
                f"{axis.size} ranks, which they must where tokens are split too; choose another degree"
            )
        if has_tokens and adapter.rows:
            raise UnsupportedError(
                f"TensorParallel on {adapter.model} does not run beside a cut of the image's rows yet; use CfgParallel"
            )
        self._pieces: dict[tuple[nn.Module, str], WeightPiece] = {}
        self._batch, self._place = 1, 0
        self._sizes: Mapping[str, tuple[int, ...]] = {}
        self._sums: Counter[Sum] = Counter()

    def attach(self, hooks: HookSet) -> None:
        """Puts this rank's columns into the layers, and adds the sums after them."""
        for part in self.parts:
            for columns in part.first:
                self._cut_outputs(part, columns, hooks)
            for columns in part.norms:
                self._cut_outputs(part, columns, hooks)
                hooks.add(columns.layer, AroundHook(self._norm_of(columns), signature_of(columns.layer)), "norm")
            for columns in part.scales:
                self._cut_outputs(part, columns, hooks)
            if part.turns is not None:
                change = partial(self._cut_turns, turns=part.turns)
                hooks.add(part.turns.attention, InputHook(change, signature_of(part.turns.attention)), "columns")
            for columns in part.last:
                self._cut_inputs(part, columns, hooks)
            for count in part.counts:
                local = split_sizes(count.units, self.axis.size)[self.axis.index] * count.each
                hooks.put(count.module, count.name, local)

    def _runs(self, columns: Columns) -> tuple[tuple[int, int], ...]:
        return runs_of(columns.pieces, self.axis.size, self.axis.index)

    def _cut(self, part: Part, layer: Any, name: str, columns: Columns, dim: int, hooks: HookSet) -> None:
        """Leaves this rank's part of a weight in its layer."""
        runs = self._runs(columns)
        hooks.put(layer, name, cut_weight(getattr(layer, name), runs, dim, part.name))
        self._pieces[layer, name] = WeightPiece(dim, runs)

    def _cut_turns(self, named: dict[str, Any], turns: HeadTurns) -> None:
        """Keeps the positions of this rank's heads."""
        groups, each = turns.heads
        shares = split_sizes(groups, self.axis.size)
        first, count = (each * number for number in (offsets(shares)[self.axis.index], shares[self.axis.index]))

        def narrowed(tensor: Tensor) -> Tensor:
            if tensor.shape[-1] == groups * each * turns.width:
                return tensor.narrow(-1, first * turns.width, count * turns.width)
            # The heads' dim is before that of the tokens, or after it.
            return tensor.narrow(1 if tensor.ndim == 4 else -2, first, count)

        given = [name for name in turns.names if named.get(name) is not None]
        named |= {name: tree_map(narrowed, named[name]) for name in given}

    def _cut_outputs(self, part: Part, columns: Columns, hooks: HookSet) -> None:
        for layer in writers_of(columns.layer):
            for name, weight in list(layer.named_parameters(recurse=False)):
                if len(weight) != columns.width:  # one number for all
                    continue
                self._cut(part, layer, name, columns, 0, hooks)
            if isinstance(layer, nn.Linear):
                hooks.put(layer, "out_features", len(layer.weight))

    def _cut_inputs(self, part: Part, columns: Columns, hooks: HookSet) -> None:
        for layer in readers_of(columns.layer):
            self._cut(part, layer, "weight", columns, 1, hooks)
            hooks.put(layer, "in_features", sum(count for _, count in self._runs(columns)))
        if self.axis.index > 0:  # the first rank adds it, once
            for layer in writers_of(columns.layer):
                if (bias := getattr(layer, "bias", None)) is not None:
                    hooks.put(layer, "bias", nn.Parameter(torch.zeros_like(bias), requires_grad=False))
                    self._pieces[layer, "bias"] = WeightPiece(0, ())
        hooks.add(columns.layer, OutputHook(partial(self._sum, is_text=columns.is_text)), "sum")

    def _norm_of(self, columns: Columns) -> Callable[[Callable[..., Any], dict[str, Any]], Tensor]:
        """Returns a replacement for a norm over the whole width."""
        norm: Any = columns.layer
        width, centres = columns.width, isinstance(norm, nn.LayerNorm)
        keeps_type = type(norm) in (nn.LayerNorm, nn.RMSNorm)

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Tensor:
            (given,) = named.values()
            # diffusers' own norms always compute in single precision; torch's compute at least in it.
            working = given if keeps_type and given.dtype == torch.float64 else given.float()
            if centres:
                working = working - self._sum(working.sum(-1, keepdim=True), columns.is_text) / width
            power = self._sum(working.square().sum(-1, keepdim=True), columns.is_text) / width
            eps = torch.finfo(given.dtype).eps if norm.eps is None else norm.eps
            scaled = (working if centres else given) * torch.rsqrt(power + eps)
            if keeps_type or norm.weight is None:
                scaled = scaled.to(given.dtype)
            elif norm.weight.dtype in (torch.float16, torch.bfloat16):
                scaled = scaled.to(norm.weight.dtype)
            scaled = scaled if norm.weight is None else scaled * norm.weight
            bias = getattr(norm, "bias", None)
            return scaled if bias is None else scaled + bias

        return run

    def _sum(self, part: Tensor, is_text: bool) -> Tensor:
        """Adds up the ranks' partial results for every token."""
        shape = part.shape
        tokens = self._tokens(shape[1], is_text) if part.ndim == 3 else ()
        here = tokens[self._place] if tokens else 1
        self._sums[Sum(tokens, Fraction(part.numel(), self._batch * here), part.element_size())] += 1
        return sum_over(self.axis, part, name="sum of columns")

    def _tokens(self, length: int, is_text: bool) -> tuple[int, ...]:
        """Returns the tokens of every rank, given this rank's number; empty where they are not shared out."""
        streams = ((TEXT,),) if is_text else ((IMAGE,), (JOINT,), (IMAGE, TEXT), (TEXT,))
        for names in streams:
            if all(name in self._sizes for name in names):
                sizes = tuple(map(sum, zip(*(self._sizes[name] for name in names), strict=True)))
                if sizes[self._place] == length:
                    return sizes
        return ()

    def begin_forward(self, batch: int, cut: Cut | None) -> None:
        """Forgets the sums of the last call.

        Args:
            batch: samples in this call.
            cut: how its tokens are cut.
        """
        self._batch = batch
        self._sizes = {} if cut is None else cut.sizes
        self._place = 0 if cut is None else cut.axis.index
        self._sums.clear()

    def call_notes(self) -> tuple[tuple[Sum, int], ...]:
        """Returns the sums of the current call, and how often each was made."""
        return tuple(self._sums.items())

    def predict(self, notes: tuple[tuple[Sum, int], ...], batch: int, place: int, index: int) -> int:
        """Returns the bytes a rank sends in a call with such sums.

        Args:
            notes: what `call_notes` returned after a call.
            batch: samples in it.
            place: the rank's place among those that share out the tokens.
            index: its place on this axis.
        """
        total = 0
        for each, times in notes:
            numel = each.per_sample * batch * (each.tokens[place] if each.tokens else 1)
            total += times * sum_sends(int(numel), self.axis.size, index) * each.itemsize
        return total

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which columns of a weight this rank holds; None where it holds all."""
        return self._pieces.get((part, name))

    def describe(self) -> str:
        """Says in words what is shared out."""
        heads = sum(bool(part.counts) for part in self.parts)
        counts = {"attention": heads, "feed-forward": len(self.parts) - heads}
        return f"the columns of {' and '.join(f'{count} {kind}' for kind, count in counts.items() if count)} layers"
