"""Shares the parts of a latent out over ranks, and blends what the model predicts for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partsong.parallel.cuts.overlaps import blend, ramps
from partsong.parallel.cuts.token_grid import Lengths
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, kept_arguments, signature_of
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.latent_parallel.layout import NAMES, LatentCut, PartRules
from partsong.parallel.ranks.collectives import all_gather
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.strategy import Cut

__all__ = ["LatentParts", "PartView"]


class PartView(Protocol):
    """Describes how one kind of model is run on a part of its latent."""

    def attach(self, hooks: HookSet) -> None:
        """Puts hooks on the layers inside."""
        ...

    def lengths(self, named: Mapping[str, Any]) -> Lengths:
        """Returns how many frames, rows and columns of patches a call's latent has.

        Raises:
            UnsupportedError: they are not known, or an argument cannot be cut with the latent.
        """
        ...

    def run(self, forward: Callable[..., Any], named: dict[str, Any], cut: LatentCut, number: int) -> Any:
        """Runs the model on one part, and returns what it returns."""
        ...

    def part(self, output: Any, cut: LatentCut, number: int) -> Tensor:
        """Returns the prediction for a part from what the model returned for it."""
        ...

    def line(self, cut: LatentCut) -> tuple[int, int]:
        """Returns the dimension of a part's prediction that is cut, counted from the end, and a patch's length."""
        ...

    def returned(self, output: Any, whole: Tensor) -> Any:
        """Returns what the model would return with the prediction for the whole latent."""
        ...


class LatentParts(Cut):
    """Runs the whole model on this rank's parts of the latent, one after another, and blends those of all ranks.

    Which parts there are depends on the rules, on the latent's size and on the step, never on the number of ranks.
    They are blended in one order on every rank, so any number of ranks returns the same bits.

    Args:
        module: the denoiser.
        model: its class name.
        sample: its argument with the noisy latents.
        axis: the ranks, each with a run of parts.
        clock: its step tells along which dimension the latent is cut.
        rules: how it is cut.
        view: runs the model on a part.
    """

    varies = True

    def __init__(
        self,
        module: nn.Module,
        model: str,
        sample: str,
        axis: Axis,
        clock: StepClock,
        rules: PartRules,
        view: PartView,
    ) -> None:
        self.module, self.model, self.sample = module, model, sample
        self.axis, self.clock, self.rules, self.view = axis, clock, rules, view
        self.sizes: dict[str, tuple[int, ...]] = {}
        self._counts = split_sizes(rules.parts, axis.size)
        self._weights: dict[Any, list[Tensor]] = {}
        # What the bytes of a call depend on: its cuts, the bytes of one sample's prediction, and its step.
        self._notes: tuple[tuple[LatentCut, ...], int, int] = ((), 0, 0)

    def attach(self, hooks: HookSet) -> None:
        """Puts on the hooks that run the model on parts."""
        self.view.attach(hooks)
        hooks.add(self.module, AroundHook(self._run, signature_of(self.module)), "parts")

    def begin_forward(self, sample: Any) -> None:
        """Does nothing: parts are laid out when the arguments are known."""

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is cut."""
        turns = " and ".join(f"{cut.length} {NAMES[cut.dim]}" for cut in self._notes[0])
        return f"{turns} of patches, in turn, in {self.rules.parts} parts" if turns else "nothing: every part is whole"

    def _run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        batch, step = len(named[self.sample]), self.clock.step
        # Without an overlap of 1 the whole latent is looked at in the warm-up too, so that it is refused at once.
        cuts = () if self.rules.overlap == 1 else self.rules.cuts(self.model, self.view.lengths(named))
        if not cuts or step < self.rules.warmup_steps:
            output = forward(**named)
            self._notes = cuts, sample_of(output).nbytes // batch, step
            return output
        cut = cuts[step % len(cuts)]
        first, count = offsets(self._counts)[self.axis.index], self._counts[self.axis.index]
        parts: list[Tensor] = []
        for number in range(first, first + count):
            output = self.view.run(forward, kept_arguments(named), cut, number)
            parts.append(self.view.part(output, cut, number))
        whole = self._blended(self._of_all_ranks(parts), cut)
        self._notes = cuts, whole.nbytes // batch, step
        return self.view.returned(output, whole)

    def _of_all_ranks(self, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the predictions for all parts, in order."""
        if self.axis.size == 1:
            return own
        every = own[0].new_empty((self.rules.parts, *own[0].shape))
        torch.stack(list(own), out=every.narrow(0, offsets(self._counts)[self.axis.index], len(own)))
        all_gather(self.axis, every, self._counts, name="parts of the prediction").wait()
        return every.unbind(0)

    def _blended(self, parts: Sequence[Tensor], cut: LatentCut) -> Tensor:
        """Returns the prediction for the whole latent."""
        dim, unit = self.view.line(cut)
        shape = list(parts[0].shape)
        shape[dim] = cut.length * unit
        whole = parts[0].new_empty(shape)
        places = [(slice(start * unit, (start + cut.part) * unit),) for start in cut.starts]
        along = [part.movedim(dim, -1) for part in parts]
        blend(along, places, self._ramps(cut, unit, whole), whole.movedim(dim, -1))
        return whole

    def _ramps(self, cut: LatentCut, unit: int, like: Tensor) -> list[Tensor]:
        """Returns the weights of all parts, made once for each kind of cut."""
        key = cut, unit, like.dtype, like.device
        if key not in self._weights:
            every = ramps([start * unit for start in cut.starts], cut.part * unit)
            self._weights[key] = [weights.to(like) for weights in every]
        return self._weights[key]

    def call_notes(self) -> Any:
        """Returns the cuts of this call, the bytes of a sample's prediction, and the step."""
        return self._notes

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call like an earlier one."""
        self._notes = self._notes if notes is None else notes

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of a step: its parts, to all others."""
        cuts, sample_bytes, noted = self._notes
        number = step[0] or noted  # the first call of a denoiser may come late in the generation
        if not cuts or number < self.rules.warmup_steps:
            return 0
        cut = cuts[number % len(cuts)]
        return self._counts[index] * batch * (sample_bytes * cut.part // cut.length) * (self.axis.size - 1)
