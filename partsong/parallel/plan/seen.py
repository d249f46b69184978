"""Records the calls under a plan: shapes, steps and operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from partsong import ledger
from partsong.parallel.hooks.samples import samples_of

__all__ = ["DenoiserCall", "ModelRun", "Seen", "counting_flops"]


@dataclass(frozen=True, slots=True)
class ModelRun:
    """Remembers one run of the model within a call; a second run computes samples that the first left out.

    Attributes:
        samples: samples in it, on this rank.
        notes: what else its bytes depend on (see `Cut.call_notes`).
        sums: what the bytes of shared weights depend on (see `Shards.call_notes`).
    """

    samples: int
    notes: Any
    sums: Any = None


@dataclass(frozen=True, slots=True)
class DenoiserCall:
    """Describes one call of a denoiser, whichever ranks computed it.

    Attributes:
        batch: samples in it, before any split.
        sample_bytes: bytes of one output sample.
        tokens: tokens per stream, for each of the branches that ranks shared.
        runs: the runs of the model for each of `tokens`; empty where this rank made none.
        is_split: whether the samples were shared out.
        branches: how many branches of guidance the ranks shared in it; 0 where each made the whole call.
        was_ready: whether the answer was ready from an earlier call.
    """

    batch: int
    sample_bytes: int
    tokens: tuple[Mapping[str, int], ...]
    runs: tuple[tuple[ModelRun, ...], ...] = ((),)
    is_split: bool = False
    branches: int = 0
    was_ready: bool = False


@dataclass(slots=True)
class Seen:
    """Records the calls of this generation, for predictions.

    Attributes:
        batch: samples in the last call of the denoiser, before any split.
        sample_bytes: bytes of one output sample in it.
        branches: calls of the denoiser in the last step.
        tokens: tokens per stream in the last call.
        tokens_of: the same for the last call of each branch.
        runs_of: the runs of the model in each of these calls.
        calls: the calls of each step, where the pipeline makes them.
        changed: steps in which the shape of a branch's calls changed.
        steps: steps of this generation in which the denoiser was called; a pipeline may hold two and switch.
        latents: sizes of the latents that were shared in this call of the pipeline; some make two kinds.
        state_bytes: bytes of random states that were shared in it.
        decoded: samples and bytes per sample of each decoder call that was split.
        check_bytes: bytes that the check of an inferred row sent in this generation.
        flops: floating-point operations per input shape.
    """

    batch: int = 0
    sample_bytes: int = 0
    branches: int = 1
    tokens: dict[str, int] = field(default_factory=dict)
    tokens_of: dict[int, dict[str, int]] = field(default_factory=dict)
    runs_of: dict[int, tuple[ModelRun, ...]] = field(default_factory=dict)
    calls: dict[int, list[DenoiserCall]] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    latents: list[int] = field(default_factory=list)
    state_bytes: int = 0
    decoded: list[tuple[int, int]] = field(default_factory=list)
    check_bytes: int = 0
    flops: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def begin(self) -> None:
        """Starts a generation."""
        self.steps.clear()
        self.calls.clear()
        self.changed.clear()
        self.tokens_of.clear()
        self.runs_of.clear()
        self.check_bytes = 0

    @property
    def known(self) -> bool:
        """Says whether a call has been seen."""
        return self.batch > 0

    def note_call(self, latents: Tensor | list[Tensor], output: Any, branch: int) -> None:
        """Remembers the shapes of one call."""
        self.batch = len(latents)
        self.sample_bytes = sum(part[0].nbytes for part in samples_of(output))
        self.branches = 1 if branch == 0 else max(self.branches, branch + 1)

    def note_tokens(self, tokens: dict[str, int], runs: tuple[ModelRun, ...], branch: int) -> None:
        """Remembers how many tokens of each stream a branch had, and the runs of the model for it."""
        self.tokens = self.tokens_of[branch] = tokens
        self.runs_of[branch] = runs

    def note_work(self, step: int, branch: int, *, is_split: bool, branches: int, was_ready: bool) -> None:
        """Remembers how the ranks shared the call that was noted last."""
        whose = range(branches) if branches else (branch,)
        tokens = tuple(self.tokens_of.get(each, self.tokens) for each in whose)
        runs = tuple(self.runs_of.get(each, ()) for each in whose)
        call = DenoiserCall(self.batch, self.sample_bytes, tokens, runs, is_split, branches, was_ready)
        self.calls.setdefault(step, []).append(call)

    def calls_of(self, step: int, shares_branches: bool) -> list[DenoiserCall]:
        """Lists the calls of a step; a future step is assumed to be like the last one.

        Args:
            step: number of the step.
            shares_branches: whether ranks share the branches of guidance from the second step on.
        """
        if step in self.calls:
            return self.calls[step]
        if not self.calls:  # a loop of its own: the same calls in every step
            return [DenoiserCall(self.batch, self.sample_bytes, (self.tokens,))] * self.branches
        last = self.calls[max(self.calls)]
        if not shares_branches or len(last) == 1 or any(call.is_split or call.branches for call in last):
            return last
        tokens, runs = (tuple(parts) for parts in zip(*((call.tokens[0], call.runs[0]) for call in last), strict=True))
        first = replace(last[0], tokens=tokens, runs=runs, branches=len(last), was_ready=True)
        return [first, *(replace(call, was_ready=True) for call in last[1:])]


def counting_flops(
    forward: Callable[..., Any], named: dict[str, Any], known: dict[tuple[Any, ...], int], part: Any
) -> Any:
    """Calls `forward`, counting its operations once per set of shapes and part of the tokens into the active ledger."""
    key = (part, *(tuple(value.shape) for value in named.values() if isinstance(value, Tensor)))
    if key in known:
        output = forward(**named)
    else:
        with FlopCounterMode(display=False) as counter:
            output = forward(**named)
        known[key] = counter.get_total_flops()
    ledger.count(flops=known[key])
    return output
