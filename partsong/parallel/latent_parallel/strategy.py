"""Cuts the latent into overlapping parts, each step along another dimension (arXiv 2512.07350)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count, Share, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import IMAGE, JOINT
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.latent_parallel.layout import DIMS, PartRules
from partsong.parallel.latent_parallel.parts import LatentParts
from partsong.parallel.latent_parallel.pictures import PartPictures
from partsong.parallel.latent_parallel.tokens import PartTokens
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["LatentParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentParallel(Strategy):
    """Runs the whole model on overlapping parts of the latent, which each step cuts along another dimension in turn.

    Steps take turns to cut frames, rows and columns. Parts begin between patches, and keep their positions in the whole
    latent. What the model predicts for them is blended by position where they overlap, and the scheduler steps the
    whole. Nothing is exchanged inside the model and nothing is old: in a step a rank sends its parts of the prediction,
    once. In a few steps every region has seen all that is around it; a few tokens of the rest, as context, tell a part
    in every step what is farther away. Parts depend on their number only, so the picture is the same on any number of
    ranks. Approximate; with ``overlap=1``, or `warmup_steps` at or above the number of steps, it is exact (and no
    faster than one rank).

    Use it when links are slow or steps are few, and the picture may differ.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        parts: number of parts, at least as many as ranks; None is one for each rank.
        overlap: share of a part that it has in common with the next one, at least; 1 makes every part the whole.
        context: a part also sees one of every so many rows and columns of the rest, whose prediction is dropped; None
            sees its part alone, as in the paper and as UNets do.
        dims: dimensions that take turns, of those the latent has: ``all``, ``space``, ``time``, ``height`` or
            ``width``.
        warmup_steps: first steps that every rank computes whole.

    Source: Latent Parallelism, arXiv 2512.07350. Context and warm-up are partsong's.

    Example:
        >>> LatentParallel(parts=4, dims="space").kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    kind: ClassVar[Kind] = "approximate"
    changes_parts: ClassVar[bool] = True

    degree: Count | None = None
    parts: Count | None = None
    overlap: Share = 0.25
    context: Count | None = 4
    dims: Literal["all", "space", "time", "height", "width"] = "all"
    warmup_steps: Annotated[int, Whole(0)] = 0

    def validate(self) -> None:
        """Refuses fewer parts than ranks."""
        super(LatentParallel, self).validate()
        if self.degree is not None:
            self._check_parts(self.degree)

    def _check_parts(self, ranks: int) -> None:
        if self.parts is not None and self.parts < ranks:
            raise ArgumentError(
                f"LatentParallel: parts={self.parts} for {ranks} ranks would leave some without work; use "
                f"parts={ranks} or more, or fewer ranks"
            )

    def composes(self, other: Strategy) -> bool:
        """Says that branches of guidance and samples may be shared out beside it, but nothing inside the model."""
        return bool(other.axes) and set(other.axes) <= {"cfg", "data"}

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose tokens are not known to lie in a grid, or meet elsewhere than in attention."""
        if adapter.whole is not None:
            return f"{adapter.whole}; {adapter.instead}"
        if adapter.rows and not adapter.checked:
            return "its frames are no dimension that can be cut alone" if self.dims == "time" else None
        cuts = [cut for entry in (adapter.splits or {}).values() for cut in entry.values()]
        reasons = {
            "it joins picture and text in one sequence before its blocks": any(
                JOINT in streams for streams in adapter.attention.values()
            ),
            "its row is not partsong's, so its first call is compared with one rank's, which parts do not equal": (
                adapter.checked
            ),
            "its experts choose among all tokens of the picture": bool(adapter.gathered),
            "its convolutions look at neighbours in the grid of all tokens": bool(adapter.convolutions),
            "it attends to frames and along time in turn": adapter.factored is not None,
            "frames of several sizes, old and new, are one sequence to it": adapter.in_sections,
            "other layers than its blocks look at all tokens of the picture": any(
                cut.gathered and cut.stream == IMAGE for cut in cuts
            ),
            "its row does not say how its tokens lie in the latent": adapter.grid is None,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        return None if reason is None else f"{reason}; {adapter.instead}"

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> LatentParts | None:
        """Returns the parts of this rank; None where there is one part.

        Raises:
            ArgumentError: there are fewer parts than ranks.
            UnsupportedError: the architecture cannot be run on parts.
        """
        axis = mesh.axis("patch")
        self._check_parts(axis.size)
        parts = axis.size if self.parts is None else self.parts
        if parts == 1:
            return None
        reason = self.refuses(adapter)
        if reason is not None:  # one rank has several parts too
            raise UnsupportedError(f"LatentParallel on {adapter.model}: {reason}")
        rules = PartRules(parts=parts, overlap=self.overlap, dims=DIMS[self.dims], warmup_steps=self.warmup_steps)
        view = PartPictures(module, adapter) if adapter.rows else PartTokens(module, adapter, axis, self.context)
        return LatentParts(module, adapter.model, adapter.sample, axis, clock, rules, view)
