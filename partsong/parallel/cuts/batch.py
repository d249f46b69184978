"""Shares out the samples of a batch over ranks, and the two branches of guidance where they are called one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.cuts.same_arguments import ExpectedArguments
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.gradients import wanted_gradient
from partsong.parallel.hooks.model_hooks import kept_arguments
from partsong.parallel.hooks.samples import map_samples, samples_of
from partsong.parallel.protocols import Cut
from partsong.parallel.ranks.collectives import exchange
from partsong.parallel.ranks.gradients import gather_samples, shared_call
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets, split_sizes

__all__ = ["BatchSplit", "GuidancePair", "with_whole"]

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]


class BatchSplit:
    """Runs each rank's share of the batch and puts the samples together on every rank.

    Args:
        axis: the ranks that share the batch.
        rules: how the arguments depend on the batch.
        module: what is called; gradients of its weights are those of the whole batch.
    """

    def __init__(self, axis: Axis, rules: BatchRules, module: nn.Module) -> None:
        self.axis, self.rules, self.module = axis, rules, module

    def run(self, forward: Forward, named: Mapping[str, Any], sample: Tensor | list[Tensor]) -> Any:
        """Makes one call; the batch is counted on `sample`.

        Raises:
            UnsupportedError: it is not known how an argument depends on the batch.
        """
        total = len(sample)
        sizes = split_sizes(total, self.axis.size)
        rows = self.rows(total)
        if wanted_gradient([self.module], named):
            forward, named = shared_call(self.axis, self.module, forward, dict(named))
        cut = self.rules.cut(named, rows, total)
        output = forward(**cut)
        own = sizes[self.axis.index]
        gathered = map_samples(output, lambda x: gather_samples(self.axis, x[:own], sizes))
        return with_whole(gathered, cut, named)

    def rows(self, total: int) -> slice:
        """Returns the samples this rank computes, of `total`."""
        sizes = split_sizes(total, self.axis.size)
        start, size = offsets(sizes)[self.axis.index], sizes[self.axis.index]
        # A rank without a sample computes the first one too: its result is dropped, its shape is needed.
        return slice(start, start + size) if size else slice(0, 1)

    def predict(self, sample_bytes: int, total: int, index: int) -> int:
        """Returns the bytes the rank at `index` sends for `total` samples of `sample_bytes` each."""
        return split_sizes(total, self.axis.size)[index] * sample_bytes * (self.axis.size - 1)


class GuidancePair:
    """Computes guidance branches at the same time, although the pipeline asks for them one after the other.

    In the first step every rank computes all branches and remembers their arguments. From then on the first call of
    a step is taken as the start of the same sequence of calls: each rank computes its own branches at once, the results
    are exchanged, and the later calls find their answer ready. A call with other arguments than expected is computed on
    all ranks alike, so a pipeline that changes them in mid-generation gets the right answer more slowly.

    Args:
        axis: the ranks over the branches.
        clock: where in the generation the call stands; its `branch` is set to the branch being computed.
        sample: the argument that holds the noisy latents.
        is_even: makes equally many calls of the model on every rank; a rank with fewer branches repeats its first.
        cut: how the model is cut. Where calls may overlap in it, one rank of this axis makes those of all branches
            together, until the pipeline makes another one than was expected.

    Attributes:
        overlaps: whether the calls of a step overlap on ranks of another axis.
        computed: how many branches the ranks shared in the current call; 0 where each rank made the whole call.
        was_ready: whether the answer to the current call was there already.
        expected: predicts the arguments of the later calls of a step.
    """

    def __init__(
        self, axis: Axis, clock: StepClock, sample: str, *, is_even: bool = False, cut: Cut | None = None
    ) -> None:
        self.axis, self.clock, self.sample, self.is_even = axis, clock, sample, is_even
        self.overlaps = cut is not None and cut.overlaps and axis.size == 1
        self.computed, self.was_ready = 0, False
        # What overlaps has no need to trust: its ranks would have made the call anyway.
        self.expected, self._cut, self._was_wrong = ExpectedArguments(trusts=not self.overlaps), cut, False
        self._last: list[dict[str, Any]] = []
        self._now: list[dict[str, Any]] = []
        self._ready: dict[int, tuple[dict[str, Any], Any]] = {}
        self._warned = False
        clock.on_begin(self.reset)
        clock.on_end(self.reset)

    def reset(self) -> None:
        """Forgets the calls of the last generation."""
        self._last, self._now, self._ready, self._was_wrong = [], [], {}, False
        self.expected.reset()

    @property
    def works(self) -> bool:
        """Says whether calls of a step are computed before the pipeline makes them."""
        return self.axis.size > 1 or self.overlaps

    def run(self, forward: Forward, named: Mapping[str, Any]) -> Any:
        """Makes one call of the denoiser."""
        branch, current = self.clock.branch, kept_arguments(named)
        self.computed, self.was_ready = 0, False
        if branch == 0:
            self.expected.check()
            self._last, self._now, self._ready = self._now, [], {}
            if len(self._last) > 1:
                self._compute_all(forward, current)
            elif self._last and not self._warned and not self.overlaps:
                self._warned = True
                if self.axis.ranks[self.axis.index] == 0:
                    logger.warning(
                        "guidance is off: one call per step with one sample, so the %d ranks of axis %s all compute "
                        "the same; set the guidance scale (true_cfg_scale and a negative prompt where the pipeline "
                        "has them, as Flux and Qwen-Image do) or drop CfgParallel",
                        self.axis.size,
                        self.axis.name,
                    )
        self._now.append(current)
        expected = self._ready.pop(branch, None)
        if expected is not None and self.expected.have_come(branch, expected[0], current):
            self.was_ready = True
            return expected[1]
        self._was_wrong |= expected is not None
        return forward(**current)

    def of_rank(self, branches: int, index: int) -> Sequence[int]:
        """Lists the branches that the rank at `index` computes; a rank without a branch computes one for its shape."""
        own = range(index, branches, self.axis.size) or range(1)
        repeated = -(-branches // self.axis.size) - len(own) if self.is_even else 0
        return [*own, *[own[0]] * repeated]

    def _compute_all(self, forward: Forward, first: dict[str, Any]) -> None:
        before = self._last[0]
        branches = [self.expected.of(b, last, before, first) for b, last in enumerate(self._last)]
        if self.is_shared(branches):
            self.computed = len(branches)
            self._ready = dict(enumerate(zip(branches, self.share(forward, branches), strict=True)))

    def is_shared(self, branches: Sequence[Mapping[str, Any]]) -> bool:
        """Says whether ranks share some calls of a step.

        Windows of one picture are also separate calls, and no rank knows the shape of another's answer.
        """
        if self.overlaps:
            return len(branches) > 1 and not self._was_wrong
        shapes = {tuple(part.shape for part in tree_leaves(branch[self.sample])) for branch in branches}
        return self.axis.size > 1 and len(branches) > 1 and len(shapes) == 1

    def share(self, forward: Forward, branches: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Computes this rank's branches, and returns the outputs of all."""

        def compute(branch: int) -> Any:
            self.clock.branch = branch
            return forward(**branches[branch])

        own = self.of_rank(len(branches), self.axis.index)
        calls = [partial(compute, branch) for branch in own]
        answers = [call() for call in calls] if self._cut is None else self._cut.together(calls)
        self.clock.branch = 0
        if self.overlaps:
            return answers
        outputs = dict(zip(own, answers, strict=True))
        template = next(iter(outputs.values()))
        return [self._exchanged(b, outputs.get(b), template) for b in range(len(branches))]

    def _exchanged(self, branch: int, own: Any, template: Any) -> Any:
        """Sends every rank the results of the owner of a branch."""
        owner = branch % self.axis.size
        is_mine = owner == self.axis.index
        parts = [part.contiguous() for part in samples_of(own if is_mine else template)]
        if not is_mine:
            parts = [torch.empty_like(part) for part in parts]
        peers = [peer for peer in range(self.axis.size) if peer != self.axis.index]
        for part in parts:
            sends = dict.fromkeys(peers, part) if is_mine else {}
            recvs = {} if is_mine else {owner: part}
            exchange(self.axis, sends, recvs, name="exchange of guidance branches").wait()
        remaining = iter(parts)
        return map_samples(template, lambda _: next(remaining))

    def predict(self, sample_bytes: int, branches: int, index: int) -> int:
        """Returns the bytes the rank at `index` sends in a step after the first."""
        return len(range(index, branches, self.axis.size)) * sample_bytes * (self.axis.size - 1)


def with_whole(output: Any, cut: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
    """Returns an output in which a cut argument that the model returns, such as a cache, is whole again."""
    whole = {id(part): named[name] for name, part in cut.items()}
    if isinstance(output, tuple):
        return tuple(whole.get(id(part), part) for part in output)
    if isinstance(output, Mapping):
        return type(output)(**{name: whole.get(id(part), part) for name, part in output.items()})
    return output
