"""Sends the keys and values of a portion of the tokens in each step, all of them in turn (after arXiv 2412.02962)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.knobs import AboveZero, Number
from partsong.parallel.attention_call import AttentionCall, Inner, Runs
from partsong.parallel.exchange.displaced_patch import DisplacedPatch, DisplacedStage, SlotsKey, attend_to
from partsong.parallel.exchange.rotation import Rotation, rotation_of, select, view_of
from partsong.parallel.exchange.slots import Slots
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.mesh import AXES, Axis, Mesh

__all__ = ["CANDIDATES", "PartialPatch", "PartialStage"]

#: Portions that ``"auto"`` tries, smallest first; if all are too small, it takes everything.
CANDIDATES = (0.1, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPatch(DisplacedPatch):
    """Like `DisplacedPatch`, but a step refreshes only a portion of what ranks know of each other's keys and values.

    A rank attends to all tokens: to its own patch, fresh, and to a forecast of every other token, extrapolated by its
    age from the last two values sent. After the warm-up these arrive in turns, so that a step moves no more rows than
    if each rank were sent all text and the tokens within `portion` of a patch from its borders. Approximate;
    with ``warmup_steps`` at or above the number of steps it is exact, and with a portion of at least the number of
    ranks less one it is `DisplacedPatch`.

    ``portion="auto"`` gives every attention layer its own portion, the same on all ranks: the smallest of `CANDIDATES`
    for which leaving out all farther tokens causes an error of at most `error_budget`, or else everything. The error
    is the norm of the change in the attention's output over that of the full output, in the last step of the warm-up.
    The worst rank, branch and wave decide.

    Use it when links are so slow that even the messages of `DisplacedPatch` come late, and steps are many.

    Args:
        degree: as in `DisplacedPatch`, and so are `warmup_steps`, `order`, `norms` and `wire`.
        portion: the image tokens of a step, in patches on either side of a rank; more than 1 counts part of the next
            patch but one. Parts of a patch are rounded up to tokens. ``"auto"`` chooses for each layer.
        far: share of these tokens that comes from all tokens in turn. The rest are always the tokens nearest to a
            rank's borders.
        error_budget: the largest error ``"auto"`` accepts from leaving keys out, in one layer and step.

    Source: PCPP, arXiv 2412.02962, which leaves out farther tokens. Sending all tokens in turns, the forecast by age
    and a portion for each layer are partsong's.
    """

    portion: AboveZero | Literal["auto"] = 0.5
    far: Annotated[float, Number(0.0, 1.0, above=True)] = 1.0
    error_budget: Annotated[float, Number(0.0)] = 0.05

    def stale(self) -> str:
        """Says what is old, how it is read, and how much of it."""
        of = f"{self.portion} of a patch"
        if self.portion == "auto":
            of = f"as many tokens as each layer needs for an error of {self.error_budget}"
        how = "kept" if self.order == 0 else "carried on by their age"
        return (
            f"after {self.warmup_steps} steps, keys and values of the other ranks are the last ones sent, {how}; each "
            f"step sends {of} on either side, of which {self.far:g} in turns"
        )

    def validate(self) -> None:
        """Refuses compression where the ranks are sent different rows."""
        super(PartialPatch, self).validate()
        if self.wire != "none" and self.far < 1.0:
            raise ArgumentError(
                f"PartialPatch: wire={self.wire!r} with far={self.far}; with a wire all ranks are sent the same rows, "
                "so leave far at 1"
            )

    def unpredictable(self) -> str | None:
        """Says that layers which choose their own portion depend on what they compute."""
        return 'portion="auto" depends on what the layers compute; give a number' if self.portion == "auto" else None

    def stages(self, mesh: Mesh, clock: StepClock) -> list[DisplacedStage]:
        """Returns the attention stages this strategy adds to a plan."""
        return [PartialStage(mesh.axis("patch"), clock, self, mesh.axis(*AXES))]


class PartialStage(DisplacedStage):
    """Attends to own fresh and others' forecast keys, and sends a portion of the fresh ones.

    Attributes:
        portions: those that ``"auto"`` has chosen for each layer in this generation; empty before.
    """

    def __init__(self, axis: Axis, clock: StepClock, knobs: PartialPatch, everyone: Axis) -> None:
        super().__init__(axis, clock, knobs)
        self.everyone, self.error_budget, self.far, self.sends_ahead = everyone, knobs.error_budget, knobs.far, False
        self.portions: dict[int, float] = {}
        self.candidates = tuple(portion for portion in CANDIDATES if portion < axis.size - 1)
        self._fixed = None if isinstance(knobs.portion, str) else float(knobs.portion)
        self._errors: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Waits for pending messages, and forgets them and the portions."""
        super().reset()
        self.portions, self._errors = {}, {}

    def portion(self, layer: int) -> float:
        """Returns a layer's portion, in patches; without a limit until one is chosen."""
        return self.portions.get(layer, math.inf) if self._fixed is None else self._fixed

    @property
    def bytes_once(self) -> int:
        """Returns the bytes this rank has sent in this generation to agree on portions."""
        return 8 * len(self.portions) * len(self.candidates) * (self.everyone.size - 1)

    def run_warmup(self, call: AttentionCall, slots: Slots, inner: Inner) -> Tensor:
        """Attends to the fresh keys of all ranks; in the last such step also to portions of them."""
        out = super().run_warmup(call, slots, inner)  # keeps the fresh rows as they are
        is_open = self._fixed is None and not self.portions
        if is_open and self.clock.step >= self.knobs.warmup_steps - 1 and not self.clock.is_last_step:
            self._measure(call, slots, out, inner)
        return out

    def run_after_warmup(self, call: AttentionCall, key: SlotsKey, slots: Slots, inner: Inner) -> Tensor:
        """Attends in a step after the warm-up; the first layer of the first one chooses the portions of all."""
        if self._fixed is None and not self.portions:
            self._choose()
        return super().run_after_warmup(call, key, slots, inner)

    def sends_everything(self, runs: tuple[Runs, ...], layer: int) -> bool:
        """Says whether the budget covers all rows."""
        return not any(rotation.takes_turns for rotation in self.rotations(runs, layer))

    def rotations(self, runs: tuple[Runs, ...], layer: int) -> list[Rotation]:
        """Returns what each rank sends in a step after the warm-up."""
        portion = self.portion(layer) if self.portion(layer) < len(runs) - 1 else math.inf
        return [rotation_of(runs, sender, portion, self.far) for sender in range(len(runs))]

    def _measure(self, call: AttentionCall, slots: Slots, full: Tensor, inner: Inner) -> None:
        errors = []
        norm = full.float().norm().clamp_min(torch.finfo(torch.float32).tiny)
        for portion in self.candidates:
            view = view_of(slots.runs, self.axis.index, portion)
            rows = torch.cat(list(select(slots.held[-1], slots.runs, view)))
            errors.append((attend_to(rows, view, call, inner) - full).float().norm() / norm)
        known, worst = self._errors.get(call.layer), torch.stack(errors)
        self._errors[call.layer] = worst if known is None else torch.maximum(known, worst)

    def _choose(self) -> None:
        """Gives every layer its portion, from the errors of all ranks, in the first step in which portions matter."""
        mine = [error for layer in sorted(self._errors) for error in self._errors[layer].tolist()]
        table = agree(self.everyone, mine, name="choice of portions")
        width, everything = len(self.candidates), float(self.axis.size - 1)
        for position, layer in enumerate(sorted(self._errors)):
            by_rank = [row[position * width :][:width] for row in table]
            fits = [all(error <= self.error_budget for error in errors) for errors in zip(*by_rank, strict=True)]
            fitting = (portion for portion, fit in zip(self.candidates, fits, strict=True) if fit)
            self.portions[layer] = next(fitting, everything)
        self._errors.clear()
