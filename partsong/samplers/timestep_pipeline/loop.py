"""Runs the loop of a timestep pipeline: every rank makes its denoising steps of one block after another.

Every block has its own call of the pipeline on every rank, paused at the denoiser (see `paused`). A rank answers the
calls of its own steps. For earlier steps it answers with placeholders, and replaces them by the latents it has
received. So scheduler, guidance and decoding are the pipeline's own code.

Time goes in slots. In slot t the rank at place c of the chain works on block t - lead c, and one exchange moves its
result to the next place. The last place is the first rank's, which decodes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import Plan
from partsong.parallel.cuts.staged_blocks import PartLayout
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.samplers.long_video.causal_block import causal_block
from partsong.samplers.long_video.causal_keys import CausalKeys
from partsong.samplers.long_video.frame_counts import check_whole_blocks
from partsong.samplers.long_video.journal import Folder, VideoJournal, open_journal
from partsong.samplers.long_video.neighbour_keys import Visit
from partsong.samplers.long_video.video_blocks import VideoBlocks
from partsong.samplers.pipeline.paused import Denoise, Finished, Stepped
from partsong.samplers.pipeline.plan_call import CallTrack, refuse_arguments
from partsong.samplers.pipeline.scheduler_checks import check_memoryless
from partsong.samplers.timestep_pipeline.strategy import TimestepPipeline

__all__ = ["timestep_pipeline"]

_NO_CALLBACK = (
    "every rank makes other steps, and would show placeholders in the rest; look at the blocks that stream() yields"
)


def timestep_pipeline(
    plan: Plan, strategy: TimestepPipeline, *, everywhere: bool = True, journal: Folder | None = None, **arguments: Any
) -> Generator[Any, None, None]:
    """Samples with `TimestepPipeline`; see `StrategyRow.stream`.

    Raises:
        ArgumentError: the number of frames is not made of whole blocks, or there are more ranks than steps.
        UnsupportedError: the pipeline's video cannot be cut, its scheduler remembers earlier steps, or a callback was
            given.

    Source: arXiv 2512.04677.
    """
    refuse_arguments(arguments, {"callback_on_step_end": _NO_CALLBACK, "callback": _NO_CALLBACK})
    plan.begin_loop()
    frames = causal_block(plan.denoisers[0].module)
    blocks = VideoBlocks(plan, arguments, frames=frames, context=0, noise="independent", everywhere=everywhere)
    check_whole_blocks(blocks.sizes, frames, blocks.factor)
    chain = _Chain(blocks, strategy, everywhere, open_journal(journal, blocks, strategy))
    try:
        yield from chain.resume()
        yield from chain.run()
    finally:
        blocks.close(chain.tracks)


@dataclass(slots=True, kw_only=True)
class _Track(CallTrack):
    """Holds the call of one block on this rank.

    Attributes:
        layout: of the denoiser's calls.
        latents: input of this rank's first step, if another rank made it.
        entering: input of this rank's first layer, if another rank made it.
        leaving: output of its last layer, if another rank continues.
    """

    layout: PartLayout
    latents: Tensor | None = None
    entering: Tensor | None = None
    leaving: Tensor | None = None


class _Chain:
    def __init__(
        self, blocks: VideoBlocks, strategy: TimestepPipeline, everywhere: bool, journal: VideoJournal | None
    ) -> None:
        self.blocks, self.journal, self.plan, self.stage = blocks, journal, blocks.plan, blocks.stage
        plan, self.denoiser = self.plan, self.plan.denoisers[0]
        self.cut = None if journal is None else journal.newest_cut()
        self.first = 0 if self.cut is None else self.cut + 1
        self.axis = plan.mesh.axis(*strategy.axes)
        self.tracks: dict[int, _Track] = {}
        self.latents_bytes = 0
        stages, self.layers = plan.mesh.degrees["stage"], plan.mesh.degrees["pipe"]
        # Step by step, and in a step from its first layers to its last. The first rank decodes, so it comes last.
        self.order = [layer * stages + step for step in range(stages) for layer in range(self.layers)]
        if self.layers == 1:
            self.order = [*self.order[1:], 0]
        self.place = self.order.index(self.axis.index)
        self.layer = self.place % self.layers
        self.is_last = self.place == len(self.order) - 1
        self.decodes = everywhere or self.axis.index == 0
        self.readers = [i for i in range(self.axis.size) if (everywhere or i == 0) and i != self.order[-1]]
        self.keys = CausalKeys(causal_block(self.denoiser.module), strategy.window, strategy.sink)
        self.stage.loop = self
        with plan.looping():
            self.num_steps = self._begin(stages)
        sizes = split_sizes(self.num_steps, stages)
        start = offsets(sizes)[self.place // self.layers]
        self.own = range(start, start + sizes[self.place // self.layers])

    def _begin(self, stages: int) -> int:
        """Opens the first blocks, whose arguments the ranks compare, and finds the number of steps."""
        # A finished run opens its last block again, so that arguments are compared too.
        first = min(self.first, len(self.blocks.sizes) - 1)
        for block in range(first, min(first + AGREED_STEPS, len(self.blocks.sizes))):
            self._track(block, compare=block - first)
        scheduler = self.tracks[first].call.pipe.scheduler
        steps = len(scheduler.timesteps)
        if stages > steps:
            raise ArgumentError(
                f"{stages} ranks along {steps} denoising steps; use pipe_degree=2 or more, or at most {steps} ranks"
            )
        if self.layers > 1 and stages != steps:
            raise ArgumentError(
                f"pipe_degree={self.layers} needs ranks for each of the {steps} steps, found them for {stages}; use "
                f"{steps * self.layers} ranks"
            )
        if stages > 1:
            check_memoryless(scheduler, self.blocks.latents)
        return steps

    def resume(self) -> Iterator[Any]:
        """Yields the blocks that a journal says are done, and restores the keys that they have left."""
        if self.journal is None or self.cut is None:
            return
        yield from self.blocks.finished(map(self.journal.block, range(self.first)))
        self.keys.load(self.journal.keys(self.cut), self.stage.owns, self.own)

    def run(self) -> Iterator[Any]:
        """Works slot by slot; all ranks yield a block in the same slot, so a consumer may stop them together."""
        chain, total = len(self.order), len(self.blocks.sizes)
        flying, incoming, final = Pending("nothing"), None, None
        outputs: dict[int, Any] = {}
        for slot in range(self.first, total + chain if self.first < total else 0):
            with self.plan.looping(), torch.no_grad():
                flying.wait()
                if final is not None:
                    outputs[slot - chain] = self._finish(slot - chain, final)
                block, sends = slot - self.place, {}
                if self.first <= block < total:
                    outgoing = self._work(block, incoming)
                    sends = dict.fromkeys(self._next, outgoing)
                    if self.is_last and self.decodes and not self.readers:
                        outputs[block] = self._finish(block, outgoing)
                    elif not self.decodes:
                        self.tracks.pop(block).call.close()
                incoming, final, recvs = None, None, {}
                if self.place > 0 and self.first <= block + 1 < total:
                    incoming = recvs[self.order[self.place - 1]] = _packed(self._parts(self._track(block + 1)))
                done = slot - chain + 1
                if self.axis.index in self.readers and self.first <= done < total:
                    final = recvs[self.order[-1]] = torch.empty_like(self._run(self.tracks[done], self.num_steps))
                elif self.is_last and self.decodes and self.readers and self.first <= done < total:
                    final = outgoing  # all ranks decode it in the same slot, in which they may share the work
                flying = exchange(self.axis, sends, recvs, name="timestep pipeline")
            done -= 1 if self.readers else 0  # ranks that receive the latents have the frames a slot later
            if self.first <= done < total:
                yield outputs.pop(done, None)
        flying.wait()
        self.plan.clock.num_steps = self.plan.clock.step = total

    @property
    def _next(self) -> list[int]:
        """Lists the receivers of this rank's results."""
        return self.readers if self.is_last else [self.order[self.place + 1]]

    def _track(self, block: int, compare: int = 0) -> _Track:
        """Returns the call of a block; refused, on all ranks alike, where the ranks' calls differ."""
        if block not in self.tracks:
            call = self.blocks.open(block)
            event = call.event
            assert isinstance(event, Denoise)
            self.tracks[block] = _Track(call, layout=self.stage.layout(event.arguments))
            self.denoiser.begin_call(event.arguments, compare)
        return self.tracks[block]

    def _parts(self, track: _Track) -> list[Tensor]:
        """Allocates room for the messages to this rank for a block: latents, and the input of its first layer."""
        parts = []
        if self.place >= self.layers:
            # The call runs, on placeholders, to the point where it needs them, which shows their type.
            parts.append(torch.empty_like(self._run(track, self.own.start)))
        return parts + ([track.layout.empty_input(None, self.layer)] if self.layer else [])

    def _work(self, block: int, received: Tensor | None) -> Tensor:
        """Makes this rank's steps, or its layers of a step, for one block; returns the message to the next place."""
        track = self._track(block)
        self.keys.visit = Visit(block, 0)
        if received is not None:
            parts = _unpacked(received, self._parts(track))
            track.latents = parts[0] if self.place >= self.layers else None
            track.entering = parts[-1] if self.layer else None
        latents = self._run(track, self.own.stop)
        if self.journal is not None:
            self.journal.write_keys(block, self.keys.state())
        self.plan.clock.step = block
        self.plan.close_record()
        if self.layer == self.layers - 1:
            return latents if self.is_last else _packed([latents])
        assert track.leaving is not None
        return _packed([*([] if track.latents is None else [track.latents]), track.leaving])

    def _run(self, track: _Track, until: int) -> Tensor:
        """Runs the call until a step is made, and returns the latents."""
        while True:
            event = track.call.event
            if isinstance(event, Denoise):
                track.send(track.layout.returned(self._prediction(track, event)))
                continue
            assert isinstance(event, Stepped)
            self.latents_bytes = event.latents.nbytes
            if track.step == until:
                return event.latents
            is_first = track.step == self.own.start and track.latents is not None
            track.send(track.latents if is_first else event.latents)

    def _prediction(self, track: _Track, event: Denoise) -> Tensor:
        """Returns the model's answer in the steps of this rank, and a placeholder in others."""
        sample = torch.zeros_like(track.layout.owners).contiguous()
        if track.step not in self.own:
            return sample
        if self.layers > 1 and track.branch:
            raise UnsupportedError(
                "the pipeline calls its model several times in a step (guidance), which pipe_degree cannot share out; "
                "use guidance_scale=1.0, or pipe_degree=1"
            )
        visit = self.keys.visit = Visit(self.keys.visit.block, track.step, track.branch)
        clock = self.plan.clock
        clock.step, clock.branch = visit.block, 0
        result = self.stage.work(event.arguments, track.layout, None, track.entering)
        self.denoiser.seen.note_call(event.arguments[self.denoiser.adapter.sample], track.layout.owners, 0)
        if self.layer == self.layers - 1:
            track.layout.write(sample, None, result)
        else:
            track.leaving = result
        return sample

    def _finish(self, block: int, final: Tensor) -> Any:
        """Lets the call of a block end with the latents that all steps have made."""
        if self.journal is not None and self.plan.mesh.rank == 0:
            self.journal.write_block(block, final)
            self.journal.write_latents(block, {}, {})
        track = self.tracks.pop(block)
        while not isinstance(event := track.call.event, Finished):
            if isinstance(event, Denoise):
                track.send(track.layout.returned(torch.zeros_like(track.layout.owners)))
            else:
                assert isinstance(event, Stepped)
                track.send(final if track.step == self.num_steps else event.latents)
        return event.output

    def kept(self) -> None:
        """Returns None: there is no choice of what to keep."""

    def sends(self, step: int, index: int) -> int:
        """Returns the bytes the rank at `index` of the axis sends for one block."""
        place = self.order.index(index)
        latents = self.latents_bytes
        if place == len(self.order) - 1:
            return latents * len(self.readers)
        layer = (place + 1) % self.layers
        hidden = self.stage.sent[self.blocks.sizes[0]][layer - 1] if layer else 0
        return hidden + (latents if place + 1 >= self.layers else 0)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Returns several tensors as one message."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def _unpacked(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of a message, in the shapes and types of others."""
    pieces = message.split([tensor.nbytes for tensor in like])
    # A piece may start at an offset that its type does not allow.
    return [piece.clone().view(t.dtype).view(t.shape) for piece, t in zip(pieces, like, strict=True)]
