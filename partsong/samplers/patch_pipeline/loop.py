"""Runs PipeFusion's loop: every patch has its own call of the pipeline, and the ranks work on different patches.

The calls have the same arguments and pause at the denoiser (see `paused`). Guidance, scheduler and the rest of the
pipeline are small and run on every rank alike; only the denoiser's blocks are shared out. A call's answer has full
size: its own patch is new, the others are the newest known. So the pipeline's position-wise work is right for its
patch, and the calls' latents are put together after every step.

Time goes in slots (see `StageSlots`): in every slot each stage works on one patch and one exchange moves the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel import Plan
from partsong.parallel.cuts.staged_blocks import PartLayout
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.samplers.patch_pipeline.strategy import PatchPipeline, StagedPatches
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.plan_call import CallTrack, call_pipeline, refuse_arguments
from partsong.samplers.pipeline.scheduler_checks import check_positionwise
from partsong.samplers.pipeline.shared_text import SharedText
from partsong.samplers.pipeline.stage_slots import StageItem, StageSlots

__all__ = ["patch_pipeline"]

_NO_CALLBACK = "patches are in different steps at any time; use a strategy that leaves the pipeline's loop alone"


@torch.no_grad()
def patch_pipeline(plan: Plan, strategy: PatchPipeline, **arguments: Any) -> Any:
    """Samples with `PatchPipeline`; see `StrategyRow.loop`.

    Raises:
        UnsupportedError: the scheduler does not treat every position by itself, a callback was given, or the call
            cannot be cut into patches.

    Source: PipeFusion, arXiv 2405.14430.
    """
    refuse_arguments(arguments, {"callback_on_step_end": _NO_CALLBACK, "callback": _NO_CALLBACK})
    stage = plan.denoisers[0].cut
    assert isinstance(stage, StagedPatches)
    plan.begin_loop()
    with ExitStack() as stack, plan.looping():
        text = SharedText()
        calls: list[PausedCall] = []
        for patch in range(stage.num_patches):
            # The last patch's call is the last to finish a step: it alone sees whole latents, and decodes them.
            is_last = patch == stage.num_patches - 1
            calls.append(call_pipeline(plan, arguments, decodes=is_last, shows_progress=is_last))
            stack.enter_context(calls[-1])
            text.join(calls[-1])
        stack.callback(stage.forget)
        loop = _Loop(plan, stage, calls)
        loop.run([loop.tracks], steps=strategy.warmup_steps)
        loop.run([[track] for track in loop.tracks], steps=None)
        loop.close()
        calls[-1].hand_back_random_state()
        assert isinstance(calls[-1].event, Finished)
        return calls[-1].event.output


@dataclass(slots=True, kw_only=True)
class _Track(CallTrack):
    """Counts how far the call of one patch has come."""

    patch: int


@dataclass(frozen=True, slots=True)
class _Item(StageItem):
    """Holds one call of the denoiser for a patch or the whole picture, and the step it belongs to."""

    step: int
    branch: int


class _Loop:
    def __init__(self, plan: Plan, stage: StagedPatches, calls: Sequence[PausedCall]) -> None:
        self.plan, self.stage, self.denoiser, self.axis = plan, stage, plan.denoisers[0], stage.pipe
        self.tracks = [_Track(call, patch=patch) for patch, call in enumerate(calls)]
        self.predictions: dict[int, Tensor] = {}  # for each call of a step, the newest known of all patches
        self.latents: Tensor | None = None
        self.first = 0  # where the latents begin among the model's tokens
        self._step = 0
        for track in self.tracks:
            event = track.call.send()
            if track.patch == 0 and isinstance(event, Denoise):
                check_positionwise(track.call.pipe.scheduler, self._sample(event.arguments).ndim)

    def run(self, groups: Sequence[Sequence[_Track]], steps: int | None) -> None:
        """Works until a number of steps is done, or to the end.

        In slot t every rank resumes the calls of group t mod `period` to their next question, item t, which then goes
        through the stages (see `StageSlots`).

        Args:
            groups: calls that are answered together, with the whole picture where there is one group, else a patch.
            steps: None runs until the calls have finished.
        """
        size = self.axis.size
        lead = 2 if len(groups) >= 2 * size else 1
        period = max(len(groups), lead * size)
        slots: StageSlots[_Item] = StageSlots(self.axis, lead, self._work, "patch pipeline")
        while True:
            slots.wait()
            group = slots.slot % period
            if group < len(groups):
                done = slots.take(slots.slot - period)
                if done is not None:
                    self._answer(groups[group], *done)
                item = self._next(groups[group][0], None if len(groups) == 1 else group, steps)
                if item is not None:
                    slots.items[slots.slot] = item
                elif group == len(groups) - 1:
                    return
            slots.run()

    def _work(self, item: _Item, received: Tensor | None) -> Tensor:
        clock = self.plan.clock
        self._begin(item.step)
        clock.step, clock.branch = item.step, item.branch
        result = self.stage.work(item.arguments, item.layout, item.part, received)
        sample = item.arguments[self.denoiser.adapter.sample]
        self.denoiser.seen.note_call(sample, item.layout.owners, item.branch)
        if not item.part:  # once for all patches of a call
            self.denoiser.seen.note_work(item.step, item.branch, is_split=False, branches=0, was_ready=False)
        return result

    def _sample(self, named: Mapping[str, Any]) -> Tensor:
        """Returns the model's latents, stacked where it takes a list with a tensor per picture."""
        sample = named[self.denoiser.adapter.sample]
        if isinstance(sample, list) and isinstance(sample[0], list):
            raise UnsupportedError(
                f"PatchPipeline on {self.denoiser.adapter.model}: samples of several pictures each, which lie in "
                "different places, have no common patches; use Ulysses"
            )
        return sample_of(sample)

    def _begin(self, step: int) -> None:
        """Ends the ledger's record of the previous step: a record is a step of this rank's own work."""
        if step > self._step:
            self.plan.close_record()
            self._step = step

    def _next(self, track: _Track, part: int | None, steps: int | None) -> _Item | None:
        """Returns a call's next question; None where it has finished or made its steps."""
        event = track.call.event
        if isinstance(event, Finished) or (steps is not None and track.step >= steps):
            return None
        assert isinstance(event, Denoise)
        if track.patch == 0:
            if track.step < AGREED_STEPS:
                # The ranks compare their inputs. Nothing of the previous step is pending then.
                self._begin(track.step)
            self.denoiser.begin_call(event.arguments, track.step)
        layout = self.stage.layout(event.arguments)
        if self.latents is not None:
            self.first = _place_of(self.latents, self._sample(event.arguments))
        if part is not None:
            self.stage.check_filled(layout, track.step, track.branch)
        return _Item(event.arguments, layout, part, track.step, track.branch)

    def _answer(self, tracks: Sequence[_Track], item: _Item, output: Tensor) -> None:
        """Answers calls, and lets them run to their next question."""
        known = self.predictions.get(item.branch)
        if known is None or known.shape != item.layout.owners.shape:
            known = self.predictions[item.branch] = torch.empty_like(item.layout.owners).contiguous()
        item.layout.write(known, item.part, output)
        for track in tracks:
            event = track.send(item.layout.returned(known.clone()))
            while isinstance(event, Stepped):
                event = track.send(self._assembled(event.latents, item.layout, item.part))

    def _assembled(self, latents: Tensor, layout: PartLayout, part: int | None) -> Tensor:
        """Returns a patch's new latents among the newest known of the others."""
        if part is None or self.latents is None:
            self.latents = latents.clone()
        else:
            mine = _owners_like(latents, layout.owners, self.first) == part
            self.latents = torch.where(mine, latents, self.latents)
        return self.latents.clone()

    def close(self) -> None:
        """Ends the last record, and leaves the clock at the end."""
        self.plan.close_record()
        self.plan.clock.num_steps = self.plan.clock.step = self.tracks[-1].step


def _place_of(latents: Tensor, sample: Tensor) -> int:
    """Returns where latents `[B, L, C]` begin in the model's input `[B, T, C]`; 0 in any other case.

    A picture to be edited follows them there, and a text may precede them.
    """
    if latents.ndim != 3 or sample.ndim != 3 or sample.shape[1] <= latents.shape[1]:
        return 0
    behind = sample.shape[1] - latents.shape[1]
    last = sample[-1, behind:]
    return behind if last.shape == latents[-1].shape and torch.equal(last, latents[-1].to(last)) else 0


def _owners_like(latents: Tensor, owners: Tensor, first: int) -> Tensor:
    """Returns the patch of every position of the latents; the model's output may have other channels or batch."""
    mine = owners[:1]
    if mine.ndim == latents.ndim + 1 and mine.shape[2] == 1:
        mine = mine.squeeze(2)  # a single frame
    if mine.ndim == latents.ndim == 3:
        mine = mine[:, first : first + latents.shape[1]]
    channels = 2 if latents.ndim == 3 else 1
    if latents.shape[1:] != mine.shape[1:] and latents.ndim == mine.ndim:
        channel = mine.narrow(channels, 0, 1)
        mine = channel if bool((mine == channel).all()) else mine
    wanted = list(latents.shape)
    wanted[channels] = mine.shape[channels] if mine.shape[channels] == 1 else wanted[channels]
    if wanted[1:] != list(mine.shape[1:]):
        raise UnsupportedError(
            f"the pipeline's latents of shape {list(latents.shape)} do not lie like the denoiser's output of shape "
            f"{list(owners.shape)}, so patches cannot be put together; use Ulysses or DisplacedPatch"
        )
    return mine
