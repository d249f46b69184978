"""What a plan splits and moves, predicted from shapes alone; the ledger counts the same bytes when they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.ranks.mesh import AXES
from partsong.parallel.ranks.noise import SHAPE_NUMBERS

if TYPE_CHECKING:
    from partsong.parallel.plan.plan import Plan

__all__ = ["Explanation", "Seen", "counting_flops", "explain"]

#: The stream of tokens of a cut that deals out whole patches.
PATCHES = "patches"
#: First steps of a generation in which ranks compare what they were given.
AGREED_STEPS = 2


@dataclass(slots=True)
class Seen:
    """Shapes of the last calls, which the prediction is made for.

    Attributes:
        batch: samples in one call of the denoiser, before any split.
        sample_bytes: bytes of one output sample.
        branches: calls of the denoiser per step.
        tokens: tokens per stream.
        steps: steps of this generation in which the denoiser was called; a pipeline may hold two and switch.
        latents_bytes: size of the first latents where they were shared.
        state_bytes: size of the random state where it was shared.
        decoded: samples and bytes per sample of each decoder call that was split.
        check_bytes: what the check of an inferred row sent in this generation.
        flops: floating-point operations per input shape.
    """

    batch: int = 0
    sample_bytes: int = 0
    branches: int = 1
    tokens: dict[str, int] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    latents_bytes: int = 0
    state_bytes: int = 0
    decoded: list[tuple[int, int]] = field(default_factory=list)
    check_bytes: int = 0
    flops: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def begin(self) -> None:
        """Starts a generation."""
        self.steps.clear()
        self.check_bytes = 0

    @property
    def known(self) -> bool:
        """Whether a call has been seen."""
        return self.batch > 0

    def note_call(self, latents: Tensor | list[Tensor], sample: Tensor, branch: int) -> None:
        """Remembers the shapes of one call."""
        self.batch = len(latents)
        self.sample_bytes = sample[0].numel() * sample.element_size()
        self.branches = 1 if branch == 0 else max(self.branches, branch + 1)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan splits, keeps stale and moves.

    Attributes:
        kind: ``exact``, ``bounded`` or ``approximate``.
        split: what is cut, one line per mesh axis.
        stale: what is one step old; empty where nothing is.
        kept: what is kept between calls and how much memory it takes, where a strategy leaves a choice.
        bytes_by_step: for each step of a generation, the bytes each rank sends.
        bytes_once: bytes each rank sends once per generation.
    """

    kind: str
    split: tuple[str, ...]
    stale: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_by_step: tuple[tuple[int, ...], ...]
    bytes_once: tuple[int, ...]

    @property
    def bytes_per_step(self) -> list[int]:
        """Bytes each rank sends in a step in the middle of a generation."""
        return list(self.bytes_by_step[len(self.bytes_by_step) // 2])

    def bytes_total(self) -> list[int]:
        """Bytes each rank sends in the whole generation."""
        in_steps = map(sum, zip(*self.bytes_by_step, strict=True))
        return [once + steps for once, steps in zip(self.bytes_once, in_steps, strict=True)]

    def __str__(self) -> str:
        lines = [f"{self.kind}; {len(self.bytes_by_step)} steps", *(f"  split: {line}" for line in self.split)]
        lines += [f"  stale: {line}" for line in self.stale]
        lines += [f"  kept: {line}" for line in self.kept]
        for rank, sent in enumerate(self.bytes_per_step):
            lines.append(f"  rank {rank} sends {sent:,} bytes per step, {self.bytes_total()[rank]:,} in all")
        return "\n".join(lines)


def explain(plan: Plan) -> Explanation:
    """The prediction for the shapes a plan has seen last."""
    steps = plan.clock.num_steps or plan.clock.step + 1
    ranks = range(plan.mesh.world_size)
    by_step = tuple(tuple(_step_bytes(plan, step, rank) for rank in ranks) for step in range(steps))
    return Explanation(
        kind=plan.kind,
        split=tuple(_split_lines(plan)),
        stale=tuple(_stale_lines(plan)),
        kept=tuple(_kept_lines(plan)),
        bytes_by_step=by_step,
        bytes_once=tuple(_once_bytes(plan, rank) for rank in ranks),
    )


def _place(plan: Plan, rank: int, axes: tuple[str, ...]) -> int:
    """The index of a rank along flattened axes; ranks count through the mesh with the last axis fastest."""
    coordinates, rest = {}, rank
    for axis in reversed(AXES):
        rest, coordinates[axis] = divmod(rest, plan.mesh.degrees[axis])
    index = 0
    for axis in AXES:
        if axis in axes:
            index = index * plan.mesh.degrees[axis] + coordinates[axis]
    return index


def _step_bytes(plan: Plan, step: int, rank: int) -> int:
    total = 0
    agreement = 8 * 4 * (plan.mesh.world_size - 1)
    for denoiser in plan.denoisers:
        if not denoiser.seen.known:
            continue
        called = _called_in(plan, denoiser)
        if step in called:
            position = called.index(step)
            total += _denoiser_bytes(plan, denoiser, step, position, rank)
            total += agreement * len(denoiser.adapter.compared) if position < AGREED_STEPS else 0
    return total


def _called_in(plan: Plan, denoiser: Any) -> list[int]:
    """The steps a denoiser is called in; those still to come fall to the one that was called last."""
    last = {id(d): max(d.seen.steps, default=-1) for d in plan.denoisers}
    done = max(last.values())
    ahead = range(done + 1, plan.clock.num_steps or 0) if last[id(denoiser)] == done else ()
    return sorted({*denoiser.seen.steps, *ahead})


def _denoiser_bytes(plan: Plan, denoiser: Any, step: int, position: int, rank: int) -> int:
    seen = denoiser.seen
    decided = sum(seen.branches * cache.predict(step) for cache in denoiser.caches)
    # A loop of its own makes the same calls on all of them.
    if plan.loop is None and denoiser.batch.axis.size > 1 and seen.batch > 1:
        index = _place(plan, rank, ("data", "cfg"))
        gathered = denoiser.batch.predict(seen.sample_bytes, seen.batch, index)
        local = max(1, gathered // (seen.sample_bytes * (denoiser.batch.axis.size - 1)))
        return decided + seen.branches * (gathered + _sequence_bytes(plan, denoiser, step, rank, local))
    forwards, swapped = seen.branches, 0
    if denoiser.guidance.axis.size > 1 and position > 0 and seen.branches > 1:
        index = _place(plan, rank, ("cfg",))
        forwards = max(1, len(range(index, seen.branches, denoiser.guidance.axis.size)))
        swapped = denoiser.guidance.predict(seen.sample_bytes, seen.branches, index)
    return decided + swapped + forwards * _sequence_bytes(plan, denoiser, step, rank, seen.batch)


def _sequence_bytes(plan: Plan, denoiser: Any, step: int, rank: int, batch: int) -> int:
    if denoiser.sequence is None:
        return 0
    place = _place(plan, rank, ("pipe", "stage", "clip", *TOKEN_AXES))
    # A denoiser's own first step has nothing stale to read, however late in the generation it comes.
    begins = not denoiser.seen.steps or step == min(denoiser.seen.steps)
    when = (0 if begins else step, plan.clock.num_steps == step + 1)
    return denoiser.sequence.predict(batch, denoiser.seen.tokens, _itemsize(denoiser.module), place, when)


def _itemsize(module: nn.Module) -> int:
    return next(p for p in module.parameters() if p.is_floating_point()).element_size()


def _once_bytes(plan: Plan, rank: int) -> int:
    peers = plan.mesh.world_size - 1
    total = 8 * SHAPE_NUMBERS * peers if plan.seen.latents_bytes else 0
    total += (plan.seen.latents_bytes + plan.seen.state_bytes) * peers if rank == 0 else 0
    total += sum(denoiser.seen.check_bytes for denoiser in plan.denoisers)
    total += sum(coder.predict(rank) for coder in plan.coders)
    total += sum(getattr(stage, "bytes_once", 0) for denoiser in plan.denoisers for stage in denoiser.stages)
    size = plan.mesh.degrees["data"]
    for samples, sample_bytes in plan.seen.decoded:
        index = _place(plan, rank, ("data",))
        total += len(range(index, samples, size)) * sample_bytes * (size - 1) if size > 1 else 0
    return total


def _split_lines(plan: Plan) -> list[str]:
    seen = next((denoiser.seen for denoiser in plan.denoisers if denoiser.seen.known), Seen())
    lines = [line for coder in plan.coders for line in coder.describe()]
    degrees = plan.mesh.degrees
    tokens = " and ".join(f"{total} {stream}" for stream, total in seen.tokens.items())
    for axis in AXES:
        if degrees[axis] > 1 and seen.known:
            whole = tokens if PATCHES in seen.tokens else f"{tokens} tokens"
            what = whole if axis in TOKEN_AXES else f"{seen.batch} samples, {seen.branches} calls per step"
            what = f"{tokens} tokens in patches, and the blocks," if axis == "pipe" else what
            what = getattr(plan.denoisers[0].sequence, "whole", tokens) if axis == "clip" else what
            lines.append(f"{what} over {degrees[axis]} ranks ({axis})")
    return lines or ["nothing: one rank"]


def _stale_lines(plan: Plan) -> list[str]:
    used = [s for s in plan.strategies if any(plan.mesh.degrees[axis] > 1 for axis in s.axes) or not s.axes]
    return [line for strategy in used if (line := strategy.stale()) is not None]


def _kept_lines(plan: Plan) -> list[str]:
    found = [getattr(denoiser.sequence, "keeps", None) for denoiser in plan.denoisers]
    return [keeps() for keeps in found if keeps is not None]


def counting_flops(
    forward: Callable[..., Any], named: dict[str, Any], known: dict[tuple[Any, ...], int], part: Any
) -> Any:
    """Calls `forward`, counting its operations once per set of shapes and part of the tokens into the active ledger."""
    from partsong import ledger

    key = (part, *(tuple(value.shape) for value in named.values() if isinstance(value, Tensor)))
    if key in known:
        output = forward(**named)
    else:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            output = forward(**named)
        known[key] = counter.get_total_flops()
    ledger.count(flops=known[key])
    return output
