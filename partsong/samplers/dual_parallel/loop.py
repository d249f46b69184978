"""Runs DualParal's loop: blocks of frames in a queue of falling noise, layers over ranks.

Every block has its own call of the pipeline, paused at the denoiser (see `paused`). Guidance, scheduler and the rest of
the pipeline are small and run on every rank alike; only the denoiser's layers are shared out.

Time goes in slots (see `StageSlots`). In every slot each stage works on one visit, a block at a step, and one exchange
moves the results. Visits follow each other in one fixed order, noisiest block first, and each waits for the block's own
visit before. What it sees of its neighbours is identified by version (see `NeighbourKeys`), so the number of ranks
changes when a visit happens but never its result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel import Plan
from partsong.samplers.dual_parallel.strategy import DualParallel
from partsong.samplers.long_video.journal import Folder, VideoJournal, open_journal, parts_of, write_cut
from partsong.samplers.long_video.neighbour_keys import NeighbourKeys, Visit
from partsong.samplers.long_video.video_blocks import VideoBlocks
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.plan_call import CallTrack
from partsong.samplers.pipeline.scheduler_state import state_of
from partsong.samplers.pipeline.stage_slots import StageItem, StageSlots

__all__ = ["dual_parallel"]


def dual_parallel(
    plan: Plan, strategy: DualParallel, *, everywhere: bool = True, journal: Folder | None = None, **arguments: Any
) -> Generator[Any, None, None]:
    """Samples with `DualParallel`; see `StrategyRow.stream`.

    Raises:
        ArgumentError: the autoencoder cannot make this number of frames, or the journal is of another video.
        UnsupportedError: the pipeline's video cannot be cut into blocks.
        OutputError: the journal cannot be written.

    Source: DualParal, arXiv 2505.21070.
    """
    plan.begin_loop()
    frames, context = strategy.block_frames, strategy.context
    blocks = VideoBlocks(plan, arguments, frames=frames, context=context, noise=strategy.noise, everywhere=everywhere)
    loop = _Queue(blocks, strategy, open_journal(journal, blocks, strategy))
    try:
        yield from loop.resume()
        yield from loop.run()
    finally:
        blocks.close(loop.tracks)


@dataclass(frozen=True, slots=True)
class _Item(StageItem):
    """Holds one call of the denoiser for one block."""

    visit: Visit
    round: int


@dataclass(slots=True)
class _Order:
    """Fixes the order of visits: in round i block b is at step i - lag b; calls of a step go one after another.

    Attributes:
        round: the current round.
        branch: the call within the steps of this round.
        waiting: blocks that have not made this call yet, noisiest first.
        asking: blocks that have, and may make another.
    """

    num_blocks: int
    num_steps: int
    lag: int
    round: int = 0
    branch: int = 0
    waiting: deque[int] = field(default_factory=deque)
    asking: list[int] = field(default_factory=list)

    def members(self, number: int) -> list[int]:
        """Lists the active blocks of a round, noisiest first."""
        first = max(0, -((self.num_steps - 1 - number) // self.lag))
        return list(reversed(range(first, min(self.num_blocks, number // self.lag + 1))))

    def begin(self) -> None:
        """Lists the blocks of the round."""
        self.branch, self.waiting, self.asking = 0, deque(self.members(self.round)), []

    @property
    def is_over(self) -> bool:
        """Says whether the last round has been made."""
        return self.round >= self.lag * (self.num_blocks - 1) + self.num_steps


class _Queue:
    def __init__(self, blocks: VideoBlocks, strategy: DualParallel, journal: VideoJournal | None) -> None:
        self.blocks, self.journal, self.plan, self.stage = blocks, journal, blocks.plan, blocks.stage
        self.denoiser, self.axis = self.plan.denoisers[0], self.stage.pipe
        self.cut: dict[int, tuple[Tensor, dict[str, Tensor], dict[str, Any]]] = {}
        self.tracks: dict[int, CallTrack] = {}
        self.done: deque[Any] = deque()
        self.finished = 0
        self._record = 0
        #: Calls of the denoiser in a step, known once a block has made its first step.
        self.calls: int | None = None
        with self.plan.looping():
            first = self._open(0)
        num_steps, lag = len(first.call.pipe.scheduler.timesteps), strategy.admit_every
        self.order = _Order(len(blocks.sizes), num_steps, lag)
        self.order.begin()
        recomputes = strategy.previous == "recomputed"
        self.keys = NeighbourKeys(blocks.sizes, strategy.context, lag, num_steps, recomputes=recomputes)
        self.stage.loop = self
        # With enough active blocks, messages travel while the next visit is computed. Answers then arrive later, and
        # where few blocks are active, as at the end, ranks stand still for longer: about 3 N^2 slots, not N^2.
        active = -(-min(num_steps, len(blocks.sizes) * lag) // lag)
        is_long = num_steps * len(blocks.sizes) >= 100 * self.axis.size**2
        self.lead = 2 if active >= 2 * self.axis.size > 2 and is_long else 1

    def resume(self) -> Iterator[Any]:
        """Yields the finished blocks of a journal, and resumes the others from its newest cut."""
        cut = None if self.journal is None else self.journal.newest_cut()
        if cut is None or self.journal is None:
            return
        self.finished = self._ends(cut) + 1
        yield from self.blocks.finished(map(self.journal.block, range(self.finished)))
        if (first := self.tracks.pop(0, None)) is not None:
            first.call.close()
        self.keys.load(self.journal.keys(cut), self.stage.owns)
        tensors, values = self.journal.latents(cut)
        for block in self.order.members(cut):
            if block >= self.finished:
                with self.plan.looping():
                    track = self._open(block)
                    steps = cut + 1 - self.order.lag * block
                    self.blocks.take_up(track.call, steps, *parts_of(block, tensors, values))
                    track.step = steps
        self.order.round = self._record = cut + 1
        self.order.begin()

    def _ends(self, number: int) -> int:
        """Returns the newest block whose last step is made when a round ends; below 0 where there is none."""
        return (number - self.order.num_steps + 1) // self.order.lag

    def _is_cut(self, number: int) -> bool:
        """Says whether progress is written after a round: one that ends a block, except for the last."""
        block = self._ends(number)
        is_end = number == self.order.num_steps - 1 + self.order.lag * block
        return self.journal is not None and is_end and 0 <= block < self.order.num_blocks - 1

    def run(self) -> Iterator[Any]:
        """Works slot by slot, and yields finished parts."""
        slots: StageSlots[_Item] = StageSlots(self.axis, self.lead, self._work, "queue of blocks")
        while True:
            with self.plan.looping(), torch.no_grad():
                slots.wait()
                done = slots.take(slots.slot - self.lead * self.axis.size)
                if done is not None:
                    self._answer(*done)
                if (item := self._next()) is not None:
                    slots.items[slots.slot] = item
                is_over = self.order.is_over and not slots.items
                if not is_over:
                    slots.run()
            while self.done:
                yield self.done.popleft()
            if is_over:
                break
        self.plan.close_record()
        self.plan.clock.num_steps = self.plan.clock.step = self.order.round

    def sends(self, step: int, index: int) -> int:
        """Returns the bytes the stage at `index` sends in one call for each of the blocks of a round."""
        frames = [self.keys.in_front(b) + self.keys.frames[b] for b in self.order.members(step)]
        # A resumed run has sent nothing for blocks that were done, and may not know theirs.
        return sum(self.stage.sent[count][index] for count in frames if count in self.stage.sent)

    def kept(self) -> str:
        """Says what this rank keeps of neighbours, as a line of `Plan.explain`."""
        keys, order = self.keys, self.order
        # The keys of the block after are read before the next call. Of the block before, a version per step waits.
        once = keys.context * keys.frame_bytes
        versions = self.denoiser.seen.branches * min(order.num_steps, order.lag * (order.num_blocks - 1))
        sizes = {"cached": f"{once * (1 + versions) / 1e6:,.1f} MB", "recomputed": f"{once / 1e6:,.1f} MB"}
        own, other = ("recomputed", "cached") if keys.recomputes else ("cached", "recomputed")
        frames = max(keys.frames)
        return (
            f"previous={own!r}: keys of neighbours take {sizes[own]} on this rank, {other!r} would take "
            f"{sizes[other]}; 'recomputed' runs {keys.context + frames} frames per block, 'cached' {frames}"
        )

    def _open(self, block: int) -> CallTrack:
        self.tracks[block] = CallTrack(self.blocks.open(block))
        return self.tracks[block]

    def _next(self) -> _Item | None:
        """Returns the next visit of the order, or None where it has to wait for an answer."""
        order = self.order
        while not order.is_over:
            while order.waiting:
                block = order.waiting[0]
                step = order.round - order.lag * block
                track = None if block < self.finished else self.tracks.get(block) or self._open(block)
                if track is None or track.step > step:  # the block is done, or made this step with fewer calls
                    order.waiting.popleft()
                elif (track.step, track.branch) == (step, order.branch):
                    order.asking.append(order.waiting.popleft())
                    return self._item(block, track)
                else:
                    return None
            more = self.calls is None or order.branch + 1 < self.calls
            order.waiting, order.asking, order.branch = deque(order.asking if more else ()), [], order.branch + 1
            if not order.waiting:
                order.round += 1
                order.begin()
        return None

    def _item(self, block: int, track: CallTrack) -> _Item:
        event = track.call.event
        assert isinstance(event, Denoise)
        self.denoiser.begin_call(event.arguments, self.order.round)
        sample, dim = event.arguments[self.denoiser.adapter.sample], self.blocks.dim
        shape, frames = list(sample.shape), self.keys.frames[block] + self.keys.in_front(block)
        shape[dim] = shape[dim] // self.keys.frames[block] * frames
        # The context in front is not known yet on every rank, only its size.
        layout = self.stage.layout(self.stage.widened(event.arguments, sample.new_zeros(shape), frames))
        return _Item(event.arguments, layout, None, Visit(block, track.step, track.branch), self.order.round)

    def _work(self, item: _Item, received: Tensor | None) -> Tensor:
        clock = self.plan.clock
        if item.round > self._record:
            self.plan.close_record()
            if self.journal is not None and self._is_cut(self._record):
                # This rank has finished that round and started no later one.
                self.journal.write_keys(self._record, self.keys.state())
            self._record = item.round
        clock.step, clock.branch = item.round, item.visit.branch
        self.keys.visit = item.visit
        sample = self.keys.widened(item.arguments[self.denoiser.adapter.sample], self.blocks.dim)
        frames = self.keys.frames[item.visit.block] + self.keys.in_front(item.visit.block)
        result = self.stage.work(self.stage.widened(item.arguments, sample, frames), item.layout, None, received)
        self.denoiser.seen.note_call(sample, item.layout.owners, item.visit.branch)
        return result

    def _answer(self, item: _Item, output: Tensor) -> None:
        """Answers a call, and lets it run to its next question, or to its end."""
        block = item.visit.block
        track = self.tracks[block]
        sample = torch.empty_like(item.layout.owners).contiguous()
        item.layout.write(sample, None, output)
        in_front, length = self.keys.in_front(block), sample.shape[self.blocks.dim]
        in_front *= length // (in_front + self.keys.frames[block])
        sample = sample.narrow(self.blocks.dim, in_front, length - in_front).contiguous()
        event = track.send(item.layout.returned(sample))
        if isinstance(event, Denoise) and track.branch == self.calls:
            raise UnsupportedError(
                f"{type(self.plan.target).__name__} calls its denoiser more than {self.calls} times in step "
                f"{track.step}, and did so in none before; guide from the first step on, or use ClipParallel"
            )
        while isinstance(event, Stepped):
            if item.visit.step == 0:
                self.calls = item.visit.branch + 1
            self._note(item, track.call, event.latents)
            event = track.send(event.latents)
        if isinstance(event, Finished):
            del self.tracks[block]
            self.finished = block + 1
            self.keys.drop(block)
            self.done.append(event.output)

    def _note(self, item: _Item, call: PausedCall, latents: Tensor) -> None:
        """Writes the results of a step if a cut follows its round; only on the first rank."""
        if self.journal is None or self.plan.mesh.rank != 0:
            return
        if item.visit.step == self.order.num_steps - 1:
            self.journal.write_block(item.visit.block, latents)
        if not self._is_cut(item.round):
            return
        self.cut[item.visit.block] = (latents, *state_of(call.pipe.scheduler))
        if len(self.cut) == len(self.order.members(item.round)):
            write_cut(self.journal, item.round, self.cut)
            self.cut.clear()
