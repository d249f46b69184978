"""Cuts a model's tensors along their tokens: which, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, Split, places
from partsong.parallel.adapters.row import IMAGE, JOINT
from partsong.parallel.block_rule import BlockRule
from partsong.parallel.cuts.unpadded_tokens import UnpaddedTokens
from partsong.parallel.hooks.model_hooks import HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.strategy import Cut

__all__ = ["TokenCuts", "totals"]


class TokenCuts(Cut):
    """Cuts the tensors that a row names along their tokens, in a contiguous run for each rank.

    Where a text has fewer tokens than there are ranks, some ranks have none. Layers do not expect that, so the model
    holds a copy of one there, which takes no part in attention and is not sent.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        axis: the ranks.

    Attributes:
        sizes: tokens of each rank in the current call of the model, by stream.
        batch: samples in that call.
        present: the tokens that each sample has, where a model attends sample by sample.
    """

    #: What messages call the holders of parts of the tokens.
    parts_name = "ranks"

    def __init__(self, module: nn.Module, adapter: Adapter, axis: Axis) -> None:
        self.module, self.adapter, self.axis = module, adapter, axis
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.batch, self.present = 1, UnpaddedTokens()
        #: How many tokens that every rank holds stand in front of those that are cut.
        self.before = 0
        #: How many tokens stay together, and what they are called.
        self._unit, self._units = 1, "rows"

    def attach_cuts(self, hooks: HookSet, modules: dict[str, nn.Module]) -> None:
        """Puts the hooks on that cut the arguments and outputs of modules, given by name."""
        assert self.adapter.splits is not None
        for name, entry in self._by_module(self.adapter.splits, modules).items():
            inputs = {str(key): cut for key, cut in entry.items() if not cut.output}
            outputs = {key: cut for key, cut in entry.items() if cut.output}
            if inputs:
                change = partial(self._change_inputs, cuts=inputs, module=name)
                hooks.add(modules[name], InputHook(change, signature_of(modules[name])), "split")
            if outputs:
                hooks.add(modules[name], OutputHook(partial(self._cut_outputs, cuts=outputs)), "split-output")

    def _by_module(
        self, splits: Mapping[str, Mapping[str | int, Split]], modules: dict[str, nn.Module]
    ) -> dict[str, dict[str | int, Split]]:
        """Returns the cuts of every module that some paths name: one hook each, for all its paths."""
        cuts: dict[str, dict[str | int, Split]] = {}
        for path, entry in splits.items():
            is_optional = all(cut.optional for cut in entry.values())
            for name in places(path, modules, optional=is_optional):
                cuts.setdefault(name, {}).update(entry)
        return cuts

    def _change_inputs(self, named: dict[str, Any], cuts: dict[str, Split], module: str) -> None:
        if named.get(self.adapter.block_choice or "") is not None:
            self._unit, self._units = BlockRule.of_call(named[str(self.adapter.block_choice)]).size, "blocks"
        for name, cut in cuts.items():
            value = named.get(name)
            if cut.after is not None:
                runs = named.get(cut.after)
                self.before = runs[-1][1] if runs else 0
            if cut.gathered and value is not None:
                named[name] = self._gather(value, f"{module}.{name}", cut)
            elif value is not None or not cut.optional:
                named[name] = self._cut_any(value, cut, name)

    def attach_gather(self, hooks: HookSet, modules: dict[str, nn.Module]) -> None:
        """Puts the hooks on that put tokens together again."""
        assert self.adapter.gather is not None
        for path, cut in self.adapter.gather.items():
            for name in places(path, modules):
                hooks.add(modules[name], OutputHook(partial(self._gather_item, name=name, cut=cut)), "gather")

    def _gather_item(self, output: Any, name: str, cut: Split) -> Any:
        """Puts the tokens of an output together; of several, those of the item that the cut names, or the first."""
        if isinstance(output, Tensor):
            return self._gather(output, name, cut)
        item = cut.items[0] if cut.items else 0
        return (*output[:item], self._gather(output[item], name, cut), *output[item + 1 :])

    def _gather(self, local: Tensor, name: str, cut: Split) -> Tensor:
        """Puts a tensor together from all parts."""
        raise UnsupportedError(
            f"{self.adapter.model}: {name} needs all tokens at once, which are not at one place here"
        )

    def _cut_outputs(self, output: Any, cuts: dict[str | int, Split]) -> Any:
        if isinstance(output, Tensor):
            return self._cut(output, cuts[0], "output")
        return tuple(self._cut(x, cuts[i], f"output {i}") if i in cuts else x for i, x in enumerate(output))

    def _cut_any(self, value: Any, cut: Split, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._cut(value, cut, name)
        if isinstance(value, (list, tuple)) and cut.items:
            whole = replace(cut, items=())
            return type(value)(self._cut_any(x, whole, name) if i in cut.items else x for i, x in enumerate(value))
        if isinstance(value, (list, tuple)):
            return type(value)(None if item is None else self._cut_any(item, cut, name) for item in value)
        if isinstance(value, dict):
            return {key: self._cut_any(item, cut, name) for key, item in value.items()}
        if isinstance(value, int):
            return self._cut_number(value, cut)
        raise UnsupportedError(f"{self.adapter.model}: {name} is {type(value).__name__}, a tensor is needed")

    def _cut_number(self, value: int, cut: Split) -> int:
        """Returns how many of the tokens, or rows of tokens, that a number counts are this rank's."""
        if cut.tail:
            first, end = self._tail(value, cut.stream)
            return end - first
        if not cut.leading:
            return self.axis.split(value)[self.axis.index]
        sizes = self.shard_sizes((cut.stream,))
        return min(max(value - offsets(sizes)[self.axis.index], 0), sizes[self.axis.index])

    def _cut(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        if not cut.allows(tensor.ndim):
            if cut.optional and not any(cut.allows(ndim) for ndim in range(tensor.ndim)):
                return tensor  # nothing per token in it, such as one timestep for the whole sample
            raise UnsupportedError(f"{self.adapter.model}: {name} has {tensor.ndim} dimensions, not {cut.ndim}")
        if cut.folded:
            inner = replace(cut, dim=1, folded=False)
            return self._cut(tensor.unflatten(0, (self.batch, -1)), inner, name).flatten(0, 1)
        if cut.after is not None and self.before:
            front, rest = tensor.tensor_split([self.before], dim=cut.dim)
            return torch.cat([front, self._own(rest, cut, name)], dim=cut.dim)
        if cut.leading:
            total = sum(self.shard_sizes((cut.stream,)))
            front, rest = tensor.split([total, tensor.shape[cut.dim] - total], dim=cut.dim)
            return torch.cat([self._cut(front, replace(cut, leading=False), name), rest], dim=cut.dim)
        if cut.tail:
            first, end = self._tail(tensor.shape[cut.dim], cut.stream)
            return tensor.narrow(cut.dim, first, end - first)
        if cut.ones and tensor.shape[cut.dim] == 1:
            return tensor
        return self._own(tensor, cut, name)

    def _own(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        """Returns this rank's tokens of a tensor that has all of a stream."""
        total, parts = tensor.shape[cut.dim], self.axis.size
        if total // self._unit < parts and cut.stream in (IMAGE, JOINT):
            size = (
                f"{total} {cut.stream} tokens" if self._unit == 1 else f"{total // self._unit} {self._units} of tokens"
            )
            raise UnsupportedError(
                f"{self.adapter.model}: {size} cannot be cut over {parts} {self.parts_name}; "
                f"use at most {total // self._unit} {self.parts_name}, or a larger picture"
            )
        sizes = self.cut_sizes(total)
        if self.sizes.setdefault(cut.stream, sizes) != sizes:
            raise UnsupportedError(
                f"{self.adapter.model}: {name} has {total} {cut.stream} tokens, another input has "
                f"{sum(self.sizes[cut.stream])}"
            )
        if cut.present and not self.present.counts:  # every block gets the same one
            self.present.note(tensor, cut.stream, sizes)
        start, size = offsets(sizes)[self.axis.index], sizes[self.axis.index]
        own = tensor.narrow(cut.dim, start, size)
        if self._held(cut.stream) == size:
            return own
        copied = tensor.narrow(cut.dim, 0, 1)
        return torch.cat([own, torch.zeros_like(copied) if cut.present else copied], dim=cut.dim)

    def _held(self, stream: str) -> int:
        """Counts the tokens of a stream that the model holds here, with a copy where its layers need one more."""
        least = self.adapter.least_tokens if stream == IMAGE else 1
        return max(self.sizes[stream][self.axis.index], min(least, sum(self.sizes[stream])))

    def own_places(self, streams: tuple[str, ...], held: int) -> Tensor | None:
        """Returns where this rank's tokens are among `held` that the model holds; None where there are no others."""
        known = [stream for stream in streams if stream in self.sizes]
        lengths, own = (
            [self._held(stream) for stream in known],
            [self.sizes[stream][self.axis.index] for stream in known],
        )
        if own == lengths or sum(lengths) != held:
            return None
        return torch.cat([torch.arange(start, start + n) for start, n in zip(offsets(lengths), own, strict=True)])

    def _only_own(self, local: Tensor, cut: Split) -> Tensor:
        """Returns a tensor without the copy that the model holds where its layers need one more token."""
        return local.narrow(cut.dim, 0, self.sizes[cut.stream][self.axis.index])

    def _tail(self, length: int, stream: str) -> tuple[int, int]:
        """Returns where this rank's share of the last tokens of a stream begins and ends."""
        sizes, index = self.shard_sizes((stream,)), self.axis.index
        bounds = [start - (sum(sizes) - length) for start in (*offsets(sizes), sum(sizes))]
        return max(bounds[index], 0), max(bounds[index + 1], 0)

    def cut_sizes(self, total: int) -> tuple[int, ...]:
        """Returns the tokens of each rank: by its share, in whole rows of the grid where the row asks for that."""
        return tuple(self._unit * size for size in self.axis.split(total // self._unit))

    def begin_forward(self, sample: Any) -> None:
        """Forgets the token counts of the last call: the next one may have another shape.

        Args:
            sample: the noisy latents of this call.
        """
        self.sizes.clear()
        self.present.clear()
        self.before = 0
        self.batch, self._unit = len(sample), 1
        if self.adapter.whole_rows:
            patch: Any = self.module.config["patch_size"]  # type: ignore[index]
            self._unit = sample.shape[-1] // patch
        if self.adapter.whole_frames:
            self._units = "frames"
            _, rows, columns = self.module.config["patch_size"]  # type: ignore[index]
            self._unit = sample.shape[-2] // rows * (sample.shape[-1] // columns)

    def spread(self, own: Tensor) -> Tensor:
        """Returns this rank's picture tokens `[B, own L, C]` in their place among zeros, `[B, L, C]`."""
        sizes, index = self.shard_sizes((IMAGE,)), self.axis.index
        before = offsets(sizes)[index]
        return F.pad(own, (0, 0, before, sum(sizes) - before - sizes[index]))

    def shard_sizes(self, streams: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the tokens each rank contributes to an attention over `streams`."""
        for stream in streams:
            if stream not in self.sizes:
                raise UnsupportedError(f"{self.adapter.model}: no {stream} tokens were cut; its layout has changed")
        return totals(self.sizes, streams)


def totals(sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]) -> tuple[int, ...]:
    """Adds up the tokens of each rank over several streams."""
    return tuple(map(sum, zip(*(sizes[stream] for stream in streams), strict=True)))
