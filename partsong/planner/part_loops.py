"""Traces loops that call the denoiser for parts of a picture or a video: patches, or blocks of frames in a queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from partsong.planner.calls import Size
from partsong.planner.operators import OperatorWork
from partsong.planner.subject import Subject
from partsong.planner.trace import CallPart, CallTrace
from partsong.samplers.cascade_pipeline.slots import Cascade
from partsong.samplers.registry import CascadePipeline, DualParallel, StructureGuidance, TimestepPipeline
from partsong.samplers.structure_guidance.strategy import grid_for

__all__ = ["QueueSteps", "guided_calls", "queue_steps"]

#: Makes the trace of a call on one rank at a size.
CallAt = Callable[[Size], CallTrace]
#: Latent frames of a block of a causal model that does not say how many; those of Self-Forcing's checkpoints.
_CAUSAL_BLOCK = 3


@dataclass(frozen=True, slots=True)
class QueueSteps:
    """Describes blocks of frames that pass ranks one after the other.

    Attributes:
        visit: a call of the denoiser for a block in all layers, without messages, with the keys that it reads.
        layers: ranks that share the layers of a visit.
        visits: that a rank takes part in, one after the other.
        late: visits that are over before the last rank has its first one.
        handed: bytes that the rank sends for a visit.
        hides: whether they travel while the next visit is computed.
        kept: bytes of keys and values that stay on the rank.
        frames: of the video that are decoded at a time, which are those of a block.
    """

    visit: CallTrace
    layers: int
    visits: int
    late: int
    handed: int
    hides: bool
    kept: int
    frames: int

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes that the rank sends in all visits."""
        return self.visits * self.handed

    @property
    def working(self) -> int:
        """Returns the bytes of tensors alive at the peak of a visit."""
        return self.visit.working + self.kept + 2 * self.handed

    @property
    def weights(self) -> int:
        """Returns the bytes of the denoiser's weights on the rank."""
        return self.visit.weights // self.layers


def guided_calls(strategy: StructureGuidance, subject: Subject, size: Size, ranks: int) -> tuple[Size, int, int]:
    """Returns the size of a patch, the patches of the rank that has most, and the patches of all.

    Args:
        strategy: which says how they overlap.
        subject: the model, at its own size unless the strategy says which it was trained at.
        size: of the picture.
        ranks: that share the patches; the small picture counts as one more.

    Raises:
        UnsupportedError: the picture is no whole factor larger than the training size.
    """
    cell, side = subject.multiple, strategy.training_size
    if side is None and subject.published is None:  # its own size may be what was asked for
        side = (getattr(subject.denoiser.config, "sample_size", None) or 0) * cell or None
    trained = (subject.height, subject.width) if side is None else (side, side)
    grid = grid_for(
        (size.height // cell, size.width // cell), (trained[0] // cell, trained[1] // cell), strategy.overlap
    )
    patch = replace(size, height=grid.patch[0] * cell, width=grid.patch[1] * cell)
    guides = int(grid.factor > 1)
    return patch, -(-(len(grid.places) + guides) // ranks), len(grid.places)


def queue_steps(
    strategy: DualParallel | TimestepPipeline | CascadePipeline,
    subject: Subject,
    size: Size,
    call: CallAt,
    ranks: int,
    steps: int,
) -> QueueSteps:
    """Traces a loop of blocks in a queue.

    Args:
        strategy: the loop.
        subject: the model.
        size: of the whole video.
        call: traces the denoiser alone at a size.
        ranks: how many there are.
        steps: of the generation.
    """
    length, times = _block_frames(strategy, subject), subject.frame_multiple
    latent = (size.frames - 1) // times + 1
    trace = call(replace(size, frames=(min(length, latent) - 1) * times + 1))
    branches = 1 if subject.joined else subject.branches
    queue = _Queue(trace, length, -(-latent // length), branches, steps, length * times)
    if isinstance(strategy, DualParallel):
        return _layers_of_blocks(strategy, queue, ranks)
    if isinstance(strategy, TimestepPipeline):
        return _steps_of_blocks(strategy, queue, ranks)
    return _cascade(strategy, queue, ranks)


class _Queue(NamedTuple):
    """Holds a call for a block, its latent frames, how many blocks there are, calls of a step, steps, and frames."""

    trace: CallTrace
    block: int
    blocks: int
    branches: int
    steps: int
    frames: int


def _steps_of_blocks(strategy: TimestepPipeline, queue: _Queue, ranks: int) -> QueueSteps:
    """Describes blocks that pass ranks which make different steps."""
    trace, block, layers = queue.trace, queue.block, strategy.pipe_degree
    degree = strategy.degree or ranks // layers
    each = -(-queue.steps // degree) * queue.branches
    seen = (1 + strategy.window) * block + strategy.sink
    return QueueSteps(
        visit=_reading(trace, seen / block),
        layers=layers,
        visits=queue.blocks * each,
        late=(degree - 1) * each + layers - 1,
        handed=trace.handed if layers > 1 else trace.returned // each if degree > 1 else 0,
        hides=True,
        kept=each * trace.keys * (seen - block) // block // layers,
        frames=queue.frames,
    )


def _layers_of_blocks(strategy: DualParallel, queue: _Queue, ranks: int) -> QueueSteps:
    """Describes blocks whose layers are on different ranks, each block some steps behind the one before."""
    trace, block, blocks, branches, steps, _ = queue
    context, lag, redone = strategy.context, strategy.admit_every, strategy.previous == "recomputed"
    layers = strategy.degree or ranks
    # A block reads the frames before it and after it; the former may be computed again with it.
    visit = _reading(trace, (block + 2 * context) / block)
    visit = _longer(visit, (block + context) / block) if redone else visit
    versions = 0 if redone else branches * min(steps, lag * (blocks - 1))
    active = -(-min(steps, blocks * lag) // lag)
    is_long = steps * blocks >= 100 * layers**2
    return QueueSteps(
        visit=visit,
        layers=layers,
        visits=blocks * steps * branches,
        late=layers - 1,
        handed=int(trace.handed * ((block + context) / block if redone else 1)) if layers > 1 else 0,
        hides=active >= 2 * layers and is_long,
        kept=trace.keys * context // block * (1 + versions) // layers,
        frames=queue.frames,
    )


def _cascade(strategy: CascadePipeline, queue: _Queue, ranks: int) -> QueueSteps:
    """Describes blocks that are denoised together: every rank takes some of those of a slot, and all read all keys."""
    trace, block, blocks, branches, steps, _ = queue
    cascade = Cascade(blocks, steps, strategy.depth, strategy.degree or ranks)
    slots = [cascade.slot(number) for number in range(cascade.slots)]
    visits = sum(slot.turns for slot in slots)
    others = sum(len(slot.of(0)) * (len(slot.working) - 1) for slot in slots if slot.of(0))
    seen = (1 + strategy.window + cascade.most) * block + strategy.sink
    return QueueSteps(
        visit=_reading(trace, seen / block),
        layers=1,
        visits=branches * visits,
        late=0,
        handed=trace.keys * others // visits,
        hides=False,
        kept=branches * trace.keys * (seen - block) // block,
        frames=queue.frames,
    )


def _block_frames(strategy: DualParallel | TimestepPipeline | CascadePipeline, subject: Subject) -> int:
    if isinstance(strategy, DualParallel):
        return strategy.block_frames
    return int(getattr(subject.denoiser.config, "num_frame_per_block", None) or _CAUSAL_BLOCK)


def _reading(trace: CallTrace, times: float) -> CallTrace:
    """Returns a trace whose attentions read so many times the keys that the call makes."""
    return _changed(trace, lambda work: work._replace(flops=work.flops * times) if work.kind == "attention" else work)


def _longer(trace: CallTrace, times: float) -> CallTrace:
    """Returns a trace of a call for so many times the frames."""
    return _changed(trace, lambda work: work._replace(flops=work.flops * times, bytes=math.ceil(work.bytes * times)))


def _changed(trace: CallTrace, change: Callable[[OperatorWork], OperatorWork]) -> CallTrace:
    def each(parts: Sequence[CallPart]) -> tuple[CallPart, ...]:
        return tuple(
            replace(part, events=tuple(change(e) if isinstance(e, OperatorWork) else e for e in part.events))
            for part in parts
        )

    return replace(trace, first=each(trace.first), steady=each(trace.steady))
