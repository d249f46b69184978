"""Calibrates the measures of `StepCache` on a few generations that are computed in full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.samples import samples_of
from partsong.parallel.step_cache.blocks import CachedBlocks
from partsong.parallel.step_cache.history import Added
from partsong.parallel.step_cache.tables import CacheCalibration
from partsong.samplers.registry import StepCache

__all__ = ["StepChanges", "calibrate", "fit_polynomial", "observe"]


@dataclass(slots=True)
class StepChanges:
    """Holds what changed from each step to the next in generations that were computed in full.

    Attributes:
        inputs: relative change of the first block's modulated input, for each step, branch and sample.
        outputs: relative change of the model's output, in the same order.
        ratios: by step, growth of what all blocks added over the previous step, for each branch and sample.
    """

    inputs: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    ratios: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


def calibrate(pipe: Any, calls: Sequence[Mapping[str, Any]], *, degree: int = 4) -> CacheCalibration:
    """Calibrates both measures for one number of steps.

    Args:
        pipe: a pipeline with nothing attached.
        calls: keyword arguments of a few calls, all with the same number of steps.
        degree: of the polynomial; TeaCache takes 4.

    Returns:
        The polynomial that turns changes of input into changes of output, fitted by least squares, and
        the ratios of every step.

    Raises:
        UnsupportedError: the model's blocks are not one chain, or the calls have different numbers of steps.

    Source: TeaCache, arXiv 2411.19108, and MagCache, arXiv 2506.09045.
    """
    changes = observe(pipe, calls)
    counts = {len(ratios) for ratios in changes.ratios.values()}
    if len(counts) > 1:
        raise UnsupportedError("the calls have different numbers of steps; calibrate each number by itself")
    ratios = (float(np.mean(changes.ratios[step])) for step in sorted(changes.ratios))
    polynomial = fit_polynomial(changes.inputs, changes.outputs, degree)
    return CacheCalibration(polynomial=polynomial, ratios=(1.0, *ratios))


def fit_polynomial(inputs: Sequence[float], outputs: Sequence[float], degree: int) -> tuple[float, ...]:
    """Fits output changes as a polynomial of input changes by least squares; the highest power comes first."""
    if len(inputs) <= degree:
        raise ArgumentError(f"{len(inputs)} changes do not fix a polynomial of degree {degree}; give more calls")
    return tuple(np.polyfit(np.array(inputs), np.array(outputs), degree).tolist())


def observe(pipe: Any, calls: Sequence[Mapping[str, Any]]) -> StepChanges:
    """Measures changes from step to step in calls of a pipeline, which are computed in full.

    Args:
        pipe: a pipeline with nothing attached.
        calls: keyword arguments of the calls.
    """
    # With a threshold of 0 nothing is left out, and the sum of changes restarts in every step.
    identity = CacheCalibration(polynomial=(1.0, 0.0))
    cache = StepCache(threshold=0.0, warmup_steps=1, keep_last=False, measure="input", calibration=identity)
    changes = StepChanges()
    with parallelize(pipe, cache) as plan:
        if len(plan.denoisers) != 1:
            raise UnsupportedError(f"{type(pipe).__name__} has {len(plan.denoisers)} denoisers; calibrate one with one")
        denoiser = plan.denoisers[0]
        cached = denoiser.attachments[0]
        assert isinstance(cached, CachedBlocks)
        observer = _Observer(plan.clock, cached, changes)
        cached.on_computed(observer.take_added)
        handle = denoiser.module.register_forward_hook(lambda module, given, output: observer.take_output(output))
        try:
            for arguments in calls:
                observer.begin()
                pipe(**arguments)
                changes.inputs += [change for decision in cached.decisions for change in decision.errors]
        finally:
            handle.remove()
    return changes


class _Observer:
    """Compares a model's results with those of the previous step."""

    def __init__(self, clock: StepClock, cached: CachedBlocks, changes: StepChanges) -> None:
        self.clock, self.cached, self.changes = clock, cached, changes
        self.begin()

    def begin(self) -> None:
        """Forgets the last call."""
        self._outputs: dict[int, Tensor] = {}
        self._sizes: dict[int, Tensor] = {}

    def take_output(self, output: Any) -> None:
        """Notes how far the model's output has changed."""
        sample = samples_of(output)[0].double()
        # A batch that decides together has one change of input.
        now = sample.reshape(self.cached.measuring.samples(len(sample)), -1)
        before = self._outputs.get(self.clock.branch)
        self._outputs[self.clock.branch] = now
        if before is not None:
            self.changes.outputs += ((now - before).abs().sum(dim=1) / before.abs().sum(dim=1)).tolist()

    def take_added(self, added: Added) -> None:
        """Notes how much the sum that all blocks added has grown."""
        # For each list, the size of the addition to every token of the picture or of the joint sequence.
        tokens = [next(part for part in of_list if part is not None) for of_list in added]
        now = torch.cat([part.double().norm(dim=-1).flatten(1) for part in tokens], dim=1)
        before = self._sizes.get(self.clock.branch)
        self._sizes[self.clock.branch] = now
        if before is not None:
            self.changes.ratios[self.clock.step] += (now / before).mean(dim=1).tolist()
