"""Predicts how long the steps of a generation take under a mix of strategies, and what they move and hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.plan.dry_run import DryRun
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.planner.calls import Size
from partsong.planner.hardware import Machine
from partsong.planner.measured import rounds_of, skipped_share
from partsong.planner.replay import StepTime, replay
from partsong.planner.shallow import runs_of
from partsong.planner.subject import Subject
from partsong.planner.trace import CallTrace, Post, Wait, blocks_are_equal, trace_calls
from partsong.samplers.registry import (
    CfgParallel,
    DisplacedPatch,
    DraftedSteps,
    PatchPipeline,
    StepCache,
    TimeParallel,
)

__all__ = ["Denoising", "Tracer"]


@dataclass(frozen=True, slots=True)
class Denoising:
    """Says what the steps of a generation take on one rank.

    Attributes:
        seconds: of all steps.
        waiting: of those, in which the device waits for messages.
        bytes_sent: in all steps.
        messages: exchanges of a step in the middle.
        working: bytes of tensors alive at the peak of a call.
        weights: bytes of the denoiser's weights on the rank.
    """

    seconds: float
    waiting: float
    bytes_sent: int
    messages: int
    working: int
    weights: int


class Tracer:
    """Traces calls of one model at one size, each mix once, and puts them on clocks.

    Args:
        subject: the model.
        size: of one picture or video; its batch counts pictures, not branches of guidance.
    """

    def __init__(self, subject: Subject, size: Size) -> None:
        self.subject, self.size = subject, size
        self._traces: dict[tuple[Any, ...], CallTrace] = {}
        self._shapes = RememberedShapes()

    def denoise(self, strategies: Sequence[Strategy], machine: Machine, steps: int) -> Denoising:
        """Predicts the steps of a generation.

        Args:
            strategies: those that work on the denoiser.
            machine: what the ranks run on.
            steps: of the generation.

        Raises:
            PartsongError: the mix has no correct form.
        """
        mesh_for(strategies, machine.ranks)  # refuses strategies that do not go together
        loop = next((strategy for strategy in strategies if strategy.has_loop), None)
        adapter = adapter_for(self.subject.denoiser)
        if loop is not None and machine.ranks > 1 and (reason := loop.refuses(adapter)) is not None:
            raise UnsupportedError(f"{type(loop).__name__} on {adapter.model}: {reason}")
        others = [strategy for strategy in strategies if strategy is not loop]
        if isinstance(loop, PatchPipeline):
            return self._patches(loop, machine, steps)
        if isinstance(loop, (TimeParallel, DraftedSteps)):
            return self._windows(loop, others, machine, steps)
        return self._steps(others, machine, steps)

    def _steps(self, strategies: Sequence[Strategy], machine: Machine, steps: int) -> Denoising:
        cached = [strategy for strategy in strategies if isinstance(strategy, StepCache)]
        mix = [strategy for strategy in strategies if strategy not in cached]
        branches, calls, mix, ranks = self._branches(mix, machine.ranks)
        trace = self._trace(mix, ranks, branches)
        time = replay(trace, replace(machine, ranks=ranks))
        total = self._total(trace, time, steps, calls)
        if ranks < machine.ranks:  # every rank has its branch, and they exchange what the model returns
            total = self._with_exchange(total, machine, steps, self._output_bytes(branches))
        if cached:
            # The first block of a step that is left out, which decides, is a small part of all blocks.
            total = replace(total, seconds=total.seconds * (1 - skipped_share() * (1 - 1 / self._blocks)))
        return total

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

    def _windows(
        self, loop: TimeParallel | DraftedSteps, others: list[Strategy], machine: Machine, steps: int
    ) -> Denoising:
        """Predicts rounds in each of which the ranks of the time axis take a step of their own."""
        window = loop.depth if isinstance(loop, DraftedSteps) else loop.window
        inner = math.prod(strategy.degree or 1 for strategy in others)
        degree = loop.degree or machine.ranks // inner
        rounds, each = rounds_of(loop, steps), -(-window // degree)
        part = self._steps(others, replace(machine, ranks=machine.ranks // degree), rounds * each)
        # What the steps are is kept for each of them, and for each point its latents, prediction and sum.
        kept = (steps + 3 * window + 10) * self._latent_bytes()
        part = replace(part, working=part.working + kept)
        return self._with_exchange(part, machine, rounds, each * self._latent_bytes())

    def _patches(self, loop: PatchPipeline, machine: Machine, steps: int) -> Denoising:
        """Predicts a pipeline of stages through which patches travel, from the time of one patch in all blocks."""
        stages = machine.ranks
        patches = loop.num_patches or stages
        whole = self._steps([], replace(machine, ranks=1), 1)
        samples = self.size.batch * (self.subject.branches if self.subject.joined else 1)
        calls = 1 if self.subject.joined else self.subject.branches
        one = _silent(self._trace([DisplacedPatch(degree=patches)], patches, samples))
        patch = replay(one, replace(machine, ranks=patches)).steady
        link = machine.between(0, machine.ranks - 1)
        hop, keys = self._block_bytes(samples)
        sending = link.latency + link.post + hop / patches / link.bandwidth
        # With two patches per stage a message travels while the next patch is computed.
        stage = max(patch / stages, sending) if patches >= 2 * stages else patch / stages + sending
        warm = min(loop.warmup_steps, steps)
        first = whole.seconds + stages * (link.latency + hop / link.bandwidth)
        later = (steps - warm) * calls * patches * stage + (stages - 1) * stage
        sent = steps * calls * hop
        # The fullest stage keeps the keys and values of its own blocks, and sends one part while it receives another.
        working = whole.working + keys * -(-self._blocks // stages) // self._blocks + 2 * hop
        return Denoising(warm * first + later, 0.0, sent, patches, working, whole.weights // stages)

    def _total(self, trace: CallTrace, time: StepTime, steps: int, calls: int) -> Denoising:
        warm = min(trace.warmup, steps)
        first, later = _sent(trace.first), _sent(trace.steady)
        return Denoising(
            seconds=time.calls(steps, trace.warmup) * calls,
            waiting=time.waiting * steps * calls,
            bytes_sent=calls * (warm * (first[0] + trace.checks[0]) + (steps - warm) * (later[0] + trace.checks[1])),
            messages=later[1] * calls,
            working=trace.working,
            weights=trace.weights,
        )

    def _with_exchange(self, total: Denoising, machine: Machine, times: int, size: int) -> Denoising:
        """Adds an exchange that nothing hides, among all ranks."""
        link = machine.between(0, machine.ranks - 1)
        moved = size * (machine.ranks if link.shared else 1)
        seconds = times * (link.post + link.latency + moved / link.bandwidth)
        return replace(
            total,
            seconds=total.seconds + seconds,
            waiting=total.waiting + seconds,
            bytes_sent=total.bytes_sent + times * size,
            messages=total.messages + 1,
        )

    def _trace(self, mix: Sequence[Strategy], ranks: int, samples: int) -> CallTrace:
        key = (*mix, ranks, samples)
        if key not in self._traces:
            inputs, whole = self._inputs(samples), not self._is_uniform
            self._traces[key] = trace_calls(self.subject.denoiser, mix, ranks, inputs, shapes=self._shapes, whole=whole)
        return self._traces[key]

    def _inputs(self, samples: int) -> dict[str, Any]:
        return self.subject.call(replace(self.size, batch=samples))

    @functools.cached_property
    def _is_uniform(self) -> bool:
        return self.subject.uniform or blocks_are_equal(self.subject.denoiser, self._inputs(1), self._shapes)

    @functools.cached_property
    def _blocks(self) -> int:
        return max(1, sum(run.length for run in runs_of(self.subject.denoiser)))

    def _latent_bytes(self) -> int:
        return self._output_bytes(self.size.batch)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a tracer lives as long as a question
    def _output_bytes(self, samples: int) -> int:
        with DryRun(self.subject.denoiser, [], 1, self._inputs(samples)) as run:
            return sum(leaf.nbytes for leaf in tree_leaves(run.call()) if isinstance(leaf, Tensor))

    def _block_bytes(self, samples: int) -> tuple[int, int]:
        """Returns the bytes that one block hands on to the next, and those of the keys and values of all blocks."""
        runs = runs_of(self.subject.denoiser)
        handed: list[int] = []

        def note(block: nn.Module, given: Any, output: Any) -> None:
            handed.append(sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))

        hook = runs[0].blocks[runs[0].start].register_forward_hook(note)
        try:
            with DryRun(self.subject.denoiser, [], 1, self._inputs(samples)) as run, _KeyBytes() as keys:
                run.call()
        finally:
            hook.remove()
        return max(handed), keys.total


class _KeyBytes(TorchDispatchMode):
    """Sums up the bytes of the keys and values of attentions among picture tokens: a text is shorter than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # what a dry run calls
            query, key, value = args[:3]
            self.total += key.nbytes + value.nbytes if key.shape[-2] >= query.shape[-2] else 0
        return func(*args, **(kwargs or {}))


def _sent(parts: Sequence[Any]) -> tuple[int, int]:
    """Returns the bytes of a call, and its exchanges."""
    posts = [(event, part.times) for part in parts for event in part.events if isinstance(event, Post)]
    return sum(sum(post.sent.values()) * times for post, times in posts), sum(times for _, times in posts)


def _silent(trace: CallTrace) -> CallTrace:
    """Returns a trace without its messages."""

    def silent(parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            replace(part, events=tuple(e for e in part.events if not isinstance(e, (Post, Wait)))) for part in parts
        )

    return replace(trace, first=silent(trace.first), steady=silent(trace.steady))
