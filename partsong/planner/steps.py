"""Traces the steps of a generation under a mix of strategies: what ranks compute, send and hold, and no seconds yet."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.planner.calls import Size
from partsong.planner.decoding import DecoderCost, decoding_of
from partsong.planner.kept_traces import find_trace
from partsong.planner.part_loops import QueueSteps, guided_calls, queue_steps
from partsong.planner.shipped_traces import shipped_for
from partsong.planner.subject import Subject
from partsong.planner.trace import CallTrace, blocks_are_equal
from partsong.samplers.registry import (
    CascadePipeline,
    CfgParallel,
    DisplacedPatch,
    DraftedSteps,
    DualParallel,
    PatchPipeline,
    StepCache,
    StructureGuidance,
    TimeParallel,
    TimestepPipeline,
)

__all__ = ["PatchSteps", "PlainSteps", "TracedSteps", "Tracer", "WindowSteps"]

#: Rounds of 28 steps that the zoo's `shapes` took by the points of a window, at the default tolerance.
_ROUNDS = {1: 28, 2: 15, 3: 13, 4: 13}
#: Share of the steps whose blocks `StepCache` left out at its default threshold, there too.
_SKIPPED = 0.23


@dataclass(frozen=True, slots=True)
class PlainSteps:
    """Describes steps that follow each other, each made of equal calls of the denoiser.

    Attributes:
        trace: one call, on one of the ranks that share it.
        sharing: how many ranks share a call.
        ranks: how many take part in a step.
        calls: of a step, one after another.
        steps: how many.
        exchanged: bytes of what the denoiser returns, which ranks that share no call exchange after each step.
        left: share of the time that remains with a step cache.
    """

    trace: CallTrace
    sharing: int
    ranks: int
    calls: int
    steps: int
    exchanged: int
    left: float

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes that the rank sends in all steps."""
        trace, warm = self.trace, min(self.trace.warmup, self.steps)
        first, later = (sum(part.sent * part.times for part in call) for call in (trace.first, trace.steady))
        first, later = first + trace.checks[0], later + trace.checks[1]
        return self.calls * (warm * first + (self.steps - warm) * later) + self.steps * self.exchanged

    @property
    def working(self) -> int:
        """Returns the bytes of tensors alive at the peak of a call: every call of a step keeps its own."""
        return self.trace.working + (self.calls - 1) * self.trace.kept

    @property
    def weights(self) -> int:
        """Returns the bytes of the denoiser's weights on the rank."""
        return self.trace.weights


@dataclass(frozen=True, slots=True)
class WindowSteps:
    """Describes rounds in each of which the ranks of the time axis take a step of their own.

    Attributes:
        part: the steps that one rank takes.
        ranks: how many there are in all.
        rounds: how many.
        exchanged: bytes of latents that ranks exchange after each round.
        kept: bytes of what is kept of every step and every point.
    """

    part: PlainSteps
    ranks: int
    rounds: int
    exchanged: int
    kept: int

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes that the rank sends in all rounds."""
        return self.part.bytes_sent + self.rounds * self.exchanged

    @property
    def working(self) -> int:
        """Returns the bytes of tensors alive at the peak of a call."""
        return self.part.working + self.kept

    @property
    def weights(self) -> int:
        """Returns the bytes of the denoiser's weights on the rank."""
        return self.part.weights


@dataclass(frozen=True, slots=True)
class PatchSteps:
    """Describes a pipeline of stages through which patches travel, one stage on each rank.

    Attributes:
        whole: one step on one rank.
        patch: one patch in all blocks, without messages.
        stages: of the pipeline.
        patches: of a picture.
        calls: of a step, one after another.
        steps: how many.
        warm: for how many of them the whole picture travels through all stages.
    """

    whole: PlainSteps
    patch: CallTrace
    stages: int
    patches: int
    calls: int
    steps: int
    warm: int

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes that the rank sends in all steps."""
        return self.steps * self.calls * self.whole.trace.handed

    @property
    def working(self) -> int:
        """Returns the bytes alive at the peak of a call on the fullest stage.

        It keeps the keys and values of its own blocks, and sends one part while it receives another.
        """
        trace = self.whole.trace
        return trace.working + trace.keys * -(-trace.blocks // self.stages) // trace.blocks + 2 * trace.handed

    @property
    def weights(self) -> int:
        """Returns the bytes of the denoiser's weights on the rank."""
        return self.whole.weights // self.stages


TracedSteps = PlainSteps | WindowSteps | PatchSteps | QueueSteps


class Tracer:
    """Traces one model at one size, each mix once.

    Args:
        subject: the model.
        size: of one picture or video; its batch counts pictures, not branches of guidance.
        fused: whether the ranks are GPUs, as for `DryRun`.
    """

    def __init__(self, subject: Subject, size: Size, *, fused: bool = True) -> None:
        self.subject, self.size, self.fused = subject, size, fused
        self._traces: dict[tuple[object, ...], CallTrace] = {}
        self._shapes = RememberedShapes()
        self._shipped = shipped_for(subject, size, fused=fused)

    @functools.cached_property
    def decoding(self) -> DecoderCost | None:
        """Returns what decoding takes; None where there is no autoencoder."""
        if self._shipped is not None:
            return self._shipped.decoding
        coder = self.subject.coder
        return None if coder is None else decoding_of(coder.build(), coder.channels, coder.clip)

    def trace(self, strategies: Sequence[Strategy], ranks: int, steps: int) -> TracedSteps:
        """Traces the steps of a generation.

        Args:
            strategies: those that work on the denoiser.
            ranks: how many there are.
            steps: of the generation.

        Raises:
            PartsongError: the mix has no correct form.
        """
        mesh_for(strategies, ranks)  # refuses strategies that do not go together
        loop = next((strategy for strategy in strategies if strategy.has_loop), None)
        if loop is not None and ranks > 1:
            adapter = adapter_for(self.subject.denoiser)
            if (reason := loop.refuses(adapter)) is not None:
                raise UnsupportedError(f"{type(loop).__name__} on {adapter.model}: {reason}")
        others = [strategy for strategy in strategies if strategy is not loop]
        if isinstance(loop, PatchPipeline):
            return self._patches(loop, ranks, steps)
        if isinstance(loop, (TimeParallel, DraftedSteps)):
            return self._windows(loop, others, ranks, steps)
        if isinstance(loop, StructureGuidance):
            return self._guided(loop, ranks, steps)
        if isinstance(loop, (DualParallel, TimestepPipeline, CascadePipeline)):
            return queue_steps(loop, self.subject, self.size, self._alone, ranks, steps)
        return self._steps(others, ranks, steps)

    def _patches(self, loop: PatchPipeline, stages: int, steps: int) -> PatchSteps:
        patches, joined = loop.num_patches or stages, self.subject.joined
        samples = self.size.batch * (self.subject.branches if joined else 1)
        whole = self._steps([], 1, 1)
        return PatchSteps(
            whole=whole,
            patch=self._call([DisplacedPatch(degree=patches)], patches, samples).silent(),
            stages=stages,
            patches=patches,
            calls=1 if joined else self.subject.branches,
            steps=steps,
            warm=min(loop.warmup_steps, steps),
        )

    def _windows(
        self, loop: TimeParallel | DraftedSteps, others: list[Strategy], ranks: int, steps: int
    ) -> WindowSteps:
        window = loop.depth if isinstance(loop, DraftedSteps) else loop.window
        inner = math.prod(strategy.degree or 1 for strategy in others)
        degree = loop.degree or ranks // inner
        rounds, each = _rounds_of(loop, steps), -(-window // degree)
        latents = self._returned(self.size.batch)
        return WindowSteps(
            part=self._steps(others, ranks // degree, rounds * each),
            ranks=ranks,
            rounds=rounds,
            exchanged=each * latents,
            # Every step keeps its inputs; every point keeps its latents, prediction and sum.
            kept=(steps + 3 * window + 10) * latents,
        )

    def _guided(self, loop: StructureGuidance, ranks: int, steps: int) -> PlainSteps:
        patch, most, every = guided_calls(loop, self.subject, self.size, ranks)
        trace, calls = self._alone(patch), 1 if self.subject.joined else self.subject.branches
        return PlainSteps(
            trace=trace,
            sharing=1,
            ranks=ranks,
            calls=most * calls,
            steps=steps,
            exchanged=-(-every // ranks) * calls * trace.returned * (ranks - 1),
            left=1.0,
        )

    def _alone(self, size: Size) -> CallTrace:
        """Traces a call for a part of a picture or a video on one rank."""
        part = Tracer(self.subject, size, fused=self.fused)
        return part._call([], 1, size.batch * (self.subject.branches if self.subject.joined else 1))

    def _steps(self, strategies: Sequence[Strategy], ranks: int, steps: int) -> PlainSteps:
        cached = any(isinstance(strategy, StepCache) for strategy in strategies)
        mix = [strategy for strategy in strategies if not isinstance(strategy, StepCache)]
        samples, calls, mix, sharing = self._branches(mix, ranks)
        trace = self._call(mix, sharing, samples)
        return PlainSteps(
            trace=trace,
            sharing=sharing,
            ranks=ranks,
            calls=calls,
            steps=steps,
            # Where every rank has its branch, they exchange what the model returns.
            exchanged=self._returned(samples) if sharing < ranks else 0,
            # The first block of a step that is left out, which decides, is a small part of all blocks.
            left=1 - _SKIPPED * (1 - 1 / trace.blocks) if cached else 1.0,
        )

    def _branches(self, mix: list[Strategy], ranks: int) -> tuple[int, int, list[Strategy], int]:
        """Returns samples of a call, calls of a step, what works on a call, and the ranks that share one."""
        subject, batch = self.subject, self.size.batch
        if subject.joined or subject.branches == 1:
            return batch * subject.branches, 1, mix, ranks
        guided = [strategy for strategy in mix if isinstance(strategy, CfgParallel)]
        if not guided:
            return batch, subject.branches, mix, ranks
        if any(strategy.cuts_weights and strategy.uses_all_ranks for strategy in mix):
            raise UnsupportedError(
                "ShardedWeights beside guidance in two calls is not predicted; TensorParallel beside CfgParallel is"
            )
        degree = guided[0].degree or min(subject.branches, ranks)
        rest = [strategy for strategy in mix if strategy is not guided[0]]
        return batch, -(-subject.branches // degree), rest, ranks // degree

    def _returned(self, samples: int) -> int:
        """Returns the bytes of what the denoiser returns for a number of samples."""
        return self._call([], 1, samples).returned

    def _call(self, mix: Sequence[Strategy], ranks: int, samples: int) -> CallTrace:
        key = (*mix, ranks, samples)
        if key not in self._traces:
            shipped = None if self._shipped is None else self._shipped.trace(mix, ranks, samples)
            self._traces[key] = shipped or self._find(mix, ranks, samples)
        return self._traces[key]

    def _find(self, mix: Sequence[Strategy], ranks: int, samples: int) -> CallTrace:
        inputs, whole = self._inputs(samples), not self._is_uniform
        how = {"whole": whole, "fused": self.fused}
        return find_trace(self.subject, mix, ranks, inputs, shapes=self._shapes, **how)

    def _inputs(self, samples: int) -> dict[str, Any]:
        return self.subject.call(replace(self.size, batch=samples))

    @functools.cached_property
    def _is_uniform(self) -> bool:
        return self.subject.uniform or blocks_are_equal(self.subject.denoiser, self._inputs(1), self._shapes)


def _rounds_of(strategy: TimeParallel | DraftedSteps, steps: int) -> int:
    """Returns how many rounds a loop over windows of points takes."""
    if isinstance(strategy, DraftedSteps) and strategy.check is None:
        drafted = max(0, steps - strategy.warmup_steps)
        return steps - drafted + -(-drafted // strategy.depth)
    window = strategy.depth if isinstance(strategy, DraftedSteps) else strategy.window
    return -(-steps * _ROUNDS.get(window, 13) // 28)
