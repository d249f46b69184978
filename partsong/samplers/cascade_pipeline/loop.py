"""Runs the loop of block cascading: in every slot each block in flight makes one step.

Every block has its own call of the pipeline, paused at the denoiser (see `paused`), on the rank that it belongs to. So
scheduler and guidance are the pipeline's own code, and a scheduler may remember earlier steps. The ranks that decode
get the last latents of every block, and let a call of their own end with them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import Plan
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.parallel.ranks.collectives import exchange
from partsong.parallel.ranks.computing import computing
from partsong.samplers.cascade_pipeline.clean_keys import CleanKeys
from partsong.samplers.cascade_pipeline.frames import CascadeFrames
from partsong.samplers.cascade_pipeline.joint_forwards import JointForwards
from partsong.samplers.cascade_pipeline.slots import Cascade, Slot
from partsong.samplers.cascade_pipeline.strategy import CascadePipeline
from partsong.samplers.long_video.causal_block import causal_block
from partsong.samplers.long_video.frame_counts import check_whole_blocks
from partsong.samplers.long_video.journal import Folder
from partsong.samplers.long_video.video_blocks import VideoBlocks
from partsong.samplers.pipeline.paused import Denoise, Stepped
from partsong.samplers.pipeline.plan_call import CallTrack, refuse_arguments

__all__ = ["cascade_pipeline"]

_NO_CALLBACK = "every rank makes other steps; look at the blocks that stream() yields"


def cascade_pipeline(
    plan: Plan, strategy: CascadePipeline, *, everywhere: bool = True, journal: Folder | None = None, **arguments: Any
) -> Generator[Any, None, None]:
    """Samples with `CascadePipeline`; see `StrategyRow.stream`.

    Raises:
        ArgumentError: the number of frames is not made of whole blocks, the depth is more than the steps, or there are
            more ranks than blocks in flight.
        UnsupportedError: the pipeline's video cannot be cut, or a callback was given.

    Source: arXiv 2511.20426.
    """
    refuse_arguments(arguments, {"callback_on_step_end": _NO_CALLBACK, "callback": _NO_CALLBACK})
    plan.begin_loop()
    frames = causal_block(plan.denoisers[0].module)
    blocks = VideoBlocks(plan, arguments, frames=frames, context=0, noise="independent", everywhere=everywhere)
    check_whole_blocks(blocks.sizes, frames, blocks.factor)
    loop = _Loop(blocks, strategy, everywhere)
    try:
        loop.begin()
        yield from loop.run()
    finally:
        blocks.close(loop.tracks)


@dataclass(slots=True, kw_only=True)
class _Track(CallTrack):
    """Holds the call of one block on the rank that it belongs to.

    Attributes:
        asked: arguments of the calls of the model in the newest step.
        final: latents after the last step.
    """

    asked: list[dict[str, Any]] = field(default_factory=list)
    final: Tensor | None = None


class _Loop:
    def __init__(self, blocks: VideoBlocks, strategy: CascadePipeline, everywhere: bool) -> None:
        self.blocks, self.plan, self.strategy = blocks, blocks.plan, strategy
        self.denoiser, self.axis = self.plan.denoisers[0], self.plan.mesh.axis(*strategy.axes)
        assert isinstance(blocks.stage, CascadeFrames)
        self.stage: CascadeFrames = blocks.stage
        self.tracks: dict[int, _Track] = {}
        self.readers = range(self.axis.size if everywhere else 1)
        self.clean = CleanKeys(causal_block(self.denoiser.module), strategy.window, strategy.sink)
        #: Shared by the forwards of a slot; what a forward sees around it goes through it.
        self.keys = JointForwards(self.axis, self.stage, self.clean, self.plan.mesh.device)
        self.stage.loop = self
        self.cascade = Cascade(len(blocks.sizes), 1, 1, self.axis.size)
        self.calls, self.like = 1, torch.empty(0)
        self._knows_input = False

    def begin(self) -> None:
        """Compares the ranks' arguments, and finds the steps and the calls of a step, without the model."""
        with self.plan.looping(), torch.no_grad():
            calls = self._rehearse()
            steps, depth, name = len(calls), self.strategy.depth, type(self.plan.target).__name__
            if depth > steps:
                raise ArgumentError(f"CascadePipeline: depth={depth} of {steps} denoising steps; use 1 to {steps}")
            if len(set(calls)) > 1:
                raise UnsupportedError(
                    f"{name} calls its denoiser {', '.join(map(str, calls))} times in its steps, and blocks in flight "
                    "meet in every call; guide in all steps or in none"
                )
            self.calls = calls[0]
            self.cascade = Cascade(len(self.blocks.sizes), steps, depth, self.axis.size)
            if self.axis.size > self.cascade.most:
                raise ArgumentError(
                    f"CascadePipeline: {self.axis.size} ranks for at most {self.cascade.most} blocks in flight at "
                    f"depth={depth} of {steps} steps; use at most {self.cascade.most} ranks, or a greater depth"
                )
            last = len(self.blocks.sizes) - 1
            for step in range(1, min(AGREED_STEPS, self.cascade.slots)):
                with self.blocks.open(min(step, last)) as call:
                    assert isinstance(call.event, Denoise)
                    self.denoiser.begin_call(call.event.arguments, step)

    def _rehearse(self) -> list[int]:
        """Runs the first block's call on placeholders, and returns the calls of the model in each step."""
        calls = [0]
        with self.blocks.open(0) as call:
            event = call.event
            assert isinstance(event, Denoise)
            self.denoiser.begin_call(event.arguments, 0)
            sample = event.arguments[self.denoiser.adapter.sample]
            # Every rank knows the shapes, also one that computes nothing in a short video.
            self.denoiser.seen.note_call(sample, sample, 0)
            steps = len(call.pipe.scheduler.timesteps)
            while len(calls) <= steps:
                if isinstance(event, Denoise):
                    calls[-1] += 1
                    event = call.send(self.blocks.placeholder(event))
                else:
                    assert isinstance(event, Stepped)
                    self.like = torch.empty_like(event.latents)
                    calls.append(0)
                    event = call.send(event.latents) if len(calls) <= steps else event
        return calls[:-1]

    def run(self) -> Iterator[Any]:
        """Works slot by slot; all ranks yield a block in the same slot, so a consumer may stop them together."""
        clock = self.plan.clock
        for number in range(self.cascade.slots):
            slot = self.cascade.slot(number)
            output = None
            with self.plan.looping(), torch.no_grad():
                clock.step, clock.branch = number, 0
                for branch in range(self.calls):
                    self._call(slot, branch)
                if slot.ended is not None:
                    output = self._end(slot.ended)
            self.plan.close_record()
            if slot.ended is not None:
                yield output
        clock.num_steps = clock.step = self.cascade.slots

    def _call(self, slot: Slot, branch: int) -> None:
        """Makes one call of the model for every block of this rank."""
        own = slot.of(self.axis.index)
        calls: dict[int, Callable[[], Any]] = {}
        for block in own:
            named = self._clean(block, branch) if block == slot.clean else self._asked(block, branch)
            calls[block] = partial(self.stage.run, named)
        with computing(self.plan.mesh.device):
            outputs = self.keys.run(slot, branch, calls)
        for block, output in outputs.items():
            if block != slot.clean:
                self._answer(block, output)
        if slot.clean in own and branch == self.calls - 1:
            del self.tracks[slot.clean]

    def _asked(self, block: int, branch: int) -> dict[str, Any]:
        """Returns the arguments of the next call of a block."""
        if block not in self.tracks:
            self.tracks[block] = _Track(self.blocks.open(block))
        track = self.tracks[block]
        before = track.call.event.latents if isinstance(track.call.event, Stepped) else None
        event = track.call.event if before is None else track.send(before)
        if not isinstance(event, Denoise) or track.branch != branch:
            raise UnsupportedError(
                f"{type(self.plan.target).__name__} makes another number of calls of its denoiser in step "
                f"{track.step + 1} than in the first; guide in all steps or in none"
            )
        if before is not None and not self._knows_input:
            self._check_input(event.arguments[self.denoiser.adapter.sample], before)
        track.asked = [*track.asked[:branch], event.arguments]
        return event.arguments

    def _check_input(self, sample: Tensor, latents: Tensor) -> None:
        """Refuses a pipeline whose latents are not what its model gets: what it gets of clean ones is not known."""
        if not torch.equal(_with_latents(sample, latents), sample):
            raise UnsupportedError(
                f"{type(self.plan.target).__name__} changes its latents before it calls the model, so the input of "
                "clean latents is not known; use TimestepPipeline"
            )
        self._knows_input = True

    def _answer(self, block: int, output: Any) -> None:
        track = self.tracks[block]
        event = track.send(output)
        if isinstance(event, Stepped) and track.step == self.cascade.steps:
            track.final = event.latents

    def _clean(self, block: int, branch: int) -> dict[str, Any]:
        """Returns the arguments of a clean call: those of the last step, with the last latents and time zero."""
        track, adapter = self.tracks[block], self.denoiser.adapter
        assert track.final is not None
        named = track.asked[branch]
        sample, time = _with_latents(named[adapter.sample], track.final), torch.zeros_like(named[adapter.timestep])
        return {**named, adapter.sample: sample, adapter.timestep: time}

    def _end(self, block: int) -> Any:
        """Sends the last latents of a block to the ranks that decode, which return what the pipeline makes of them."""
        owner, index = block % self.axis.size, self.axis.index
        readers = [rank for rank in self.readers if rank != owner]
        sends, recvs = {}, {}
        if index == owner:
            track = self.tracks[block]
            assert track.final is not None
            final = track.final.contiguous()
            sends = dict.fromkeys(readers, final)
            track.call.close()
            if block == self.cascade.blocks - 1:
                del self.tracks[block]
        else:
            final = torch.empty_like(self.like)
            recvs = {owner: final} if index in readers else {}
        exchange(self.axis, sends, recvs, name="blocks that are done").wait()
        return self.blocks.finish(block, final) if index in self.readers else None

    def kept(self) -> None:
        """Returns None: there is no choice of what to keep."""

    def sends(self, step: int, index: int) -> int:
        """Returns the bytes the rank at `index` of the axis sends in a slot."""
        slot = self.cascade.slot(step)
        keys = len(slot.of(index)) * (len(slot.working) - 1) * self.keys.forward_bytes * self.calls
        owns_end = slot.ended is not None and slot.ended % self.axis.size == index
        return keys + owns_end * self.like.nbytes * sum(reader != index for reader in self.readers)


def _with_latents(sample: Tensor, latents: Tensor) -> Tensor:
    """Returns a model's input with other latents: they are its first channels, once for every branch in its batch."""
    whole = sample.clone()
    for part in whole.split(len(latents)):
        part[tuple(slice(size) for size in latents.shape)] = latents.to(part.dtype)
    return whole
