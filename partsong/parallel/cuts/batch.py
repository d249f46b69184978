"""Shares out the samples of a batch over ranks, and the two branches of guidance where they are called one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import map_sample, sample_of
from partsong.parallel.ranks.collectives import exchange, gather_tokens
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["BatchSplit", "GuidancePair"]

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


class BatchSplit:
    """Runs each rank's share of the batch and puts the samples together again on every rank.

    Args:
        axis: the ranks that share the batch.
        batched: names of arguments whose first dimension is the batch, or that are lists with an item per sample;
            dictionaries among them are searched.
        residuals: names of arguments that hold several such tensors.
        folded: names of arguments whose first dimension is the batch times the frames of a video.
    """

    def __init__(
        self, axis: Axis, batched: tuple[str, ...], residuals: tuple[str, ...] = (), folded: tuple[str, ...] = ()
    ) -> None:
        self.axis, self.batched, self.residuals, self.folded = axis, batched, residuals, folded

    def run(self, forward: Forward, named: Mapping[str, Any], sample: Tensor | list[Tensor]) -> Any:
        """Makes one call; the batch is counted on `sample`."""
        total = len(sample)
        sizes = split_sizes(total, self.axis.size)
        start, size = offsets(sizes)[self.axis.index], sizes[self.axis.index]
        # A rank without a sample computes the first one too: its result is dropped, its shape is needed.
        rows = slice(start, start + size) if size else slice(0, 1)
        local = {name: _rows(value, rows, total) if name in self.batched else value for name, value in named.items()}
        local |= {name: _each(local[name], rows, total) for name in self.residuals if local.get(name) is not None}
        local |= {name: _folded(named[name], rows, total) for name in self.folded if named.get(name) is not None}
        output = forward(**local)
        return map_sample(output, lambda x: gather_tokens(self.axis, x[:size], sizes, 0, name="gather of samples"))

    def predict(self, sample_bytes: int, total: int, index: int) -> int:
        """Returns the bytes the rank at `index` sends for `total` samples of `sample_bytes` each."""
        return split_sizes(total, self.axis.size)[index] * sample_bytes * (self.axis.size - 1)


def _rows(value: Any, rows: slice, total: int) -> Any:
    if isinstance(value, dict):
        return {name: _rows(item, rows, total) for name, item in value.items()}
    if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == total:
        return value[rows]
    if isinstance(value, (list, tuple)) and len(value) == total:
        return value[rows]
    return value


def _each(values: Any, rows: slice, total: int) -> Any:
    return _rows(values, rows, total) if isinstance(values, dict) else [_rows(value, rows, total) for value in values]


def _folded(value: Any, rows: slice, total: int) -> Any:
    """Returns the frames of some samples, from a tensor `[samples * frames, ...]` or from several."""
    if not isinstance(value, Tensor):
        return type(value)(_folded(part, rows, total) for part in value)
    frames = len(value) // total
    return value[rows.start * frames : rows.stop * frames]


class GuidancePair:
    """Computes the branches of guidance at the same time although the pipeline asks for them one after the other.

    In the first step every rank computes all branches and remembers their arguments. From then on the first call of
    a step is taken as the start of the same sequence of calls: each rank computes its own branch at once, the results
    are exchanged, and the later calls find their answer ready. A call with other arguments than expected is computed on
    all ranks alike, so a pipeline that changes them in mid-generation gets the right answer more slowly.

    Args:
        axis: the ranks over the branches.
        clock: where in the generation the call stands; its `branch` is set to the branch being computed.
    """

    def __init__(self, axis: Axis, clock: StepClock) -> None:
        self.axis, self.clock = axis, clock
        self._last: list[dict[str, Any]] = []
        self._now: list[dict[str, Any]] = []
        self._ready: dict[int, tuple[dict[str, Any], Any]] = {}
        self._warned = False
        clock.on_begin(self.reset)

    def reset(self) -> None:
        """Forgets the calls of the last generation."""
        self._last, self._now, self._ready = [], [], {}

    def run(self, forward: Forward, named: Mapping[str, Any]) -> Any:
        """Makes one call of the denoiser."""
        branch, current = self.clock.branch, dict(named)
        if branch == 0:
            self._last, self._now, self._ready = self._now, [], {}
            if len(self._last) > 1:
                self._compute_all(forward, current)
            elif self._last and not self._warned:
                self._warned = True
                logger.warning(
                    "guidance is off: one call per step with one sample, so the %d ranks of axis %s all compute the "
                    "same; set the guidance scale or drop CfgParallel",
                    self.axis.size,
                    self.axis.name,
                )
        self._now.append(current)
        expected = self._ready.pop(branch, None)
        if expected is not None and _same(expected[0], current):
            return expected[1]
        return forward(**current)

    def _compute_all(self, forward: Forward, first: dict[str, Any]) -> None:
        branches = [self._expect(last, first) for last in self._last]
        mine = [b for b in range(len(branches)) if b % self.axis.size == self.axis.index]
        outputs: dict[int, Any] = {}
        for b in mine or [0]:  # a rank without a branch computes one to know the shape
            self.clock.branch = b
            outputs[b] = forward(**branches[b])
        self.clock.branch = 0
        template = next(iter(outputs.values()))
        samples = {b: sample_of(out).contiguous() for b, out in outputs.items() if b in mine}
        for b in range(len(branches)):
            samples.setdefault(b, torch.empty_like(sample_of(template), memory_format=torch.contiguous_format))
        peers = [peer for peer in range(self.axis.size) if peer != self.axis.index]
        for b in sorted(samples):
            sends = dict.fromkeys(peers, samples[b]) if b in mine else {}
            recvs = {} if b in mine else {b % self.axis.size: samples[b]}
            exchange(self.axis, sends, recvs, name="exchange of guidance branches").wait()
        self._ready = {b: (branches[b], map_sample(template, lambda _, b=b: samples[b])) for b in samples}

    def _expect(self, last: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
        """Guesses a branch's arguments: those it shared with the first branch last time move on, the others stay."""
        before = self._last[0]
        return {name: first.get(name) if _equal(value, before.get(name)) else value for name, value in last.items()}

    def predict(self, sample_bytes: int, branches: int, index: int) -> int:
        """Returns the bytes the rank at `index` sends in a step after the first."""
        return len(range(index, branches, self.axis.size)) * sample_bytes * (self.axis.size - 1)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return _same(one, other)
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)
