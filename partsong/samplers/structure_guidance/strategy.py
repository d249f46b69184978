"""Paints pictures beyond the training resolution in patches, with a small picture as a guide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.knobs import Count, Number, Share
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.overlaps import blend, even_starts, ramps
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.collectives import Pending, all_gather, exchange
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.strategy import Cut, Kind, Strategy

__all__ = ["PatchGrid", "GuidedPatches", "StructureGuidance", "grid_for"]

MODELS = (
    "UNet2DConditionModel",
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "PixArtTransformer2DModel",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StructureGuidance(Strategy):
    """Paints a picture larger than the model was trained on in overlapping patches of the size it was trained on.

    By itself, every patch would become a picture of the whole prompt. So the pipeline also samples one small picture,
    which the patches follow. In every step, the estimate of the large picture is moved towards that of the
    small one, by the weight, until little noise is left. From there on the patches add detail. The small
    picture's estimate is one step old, so no rank waits for it. Approximate; a picture of the training size
    is one patch without a guide, which is the plain pipeline. The result does not depend on the number of ranks.
    Sample with `partsong.samplers.generate`.

    Use it when a picture should have two to four times the side of those the model was trained on.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        training_size: side in pixels of the pictures the model was trained on; None reads it from the model.
        overlap: share of a patch's side that it has in common with the next one, at least; below 1.
        weight: weight of the guide in the first step, from 0 to 1.
        until: share of noise at which the guide ends; 0 guides to the end, which leaves the small picture, enlarged.
        power: how the weight falls until then: 0 not at all, 1 in a straight line.
        mask: ``attention`` guides where the small picture attends to the prompt, ``none`` everywhere.
        guide: ``sample`` guides the estimate of the clean picture, ``prediction`` what the model predicts (the
            paper's form).

    Source: ASGDiffusion, arXiv 2412.06163.

    Example:
        >>> StructureGuidance(until=0.5, power=1.0).weight_at(0.75)
        0.5
    """

    axes: ClassVar[tuple[str, ...]] = ("patch",)
    kind: ClassVar[Kind] = "approximate"
    has_loop: ClassVar[bool] = True
    loops_alone: ClassVar[bool] = True

    degree: Count | None = None
    training_size: Count | None = None
    overlap: Annotated[float, Number(0.0, 1.0, below=True)] = 0.25
    weight: Share = 1.0
    until: Annotated[float, Number(0.0, 1.0, below=True)] = 0.3
    power: Annotated[float, Number(0.0)] = 0.0
    mask: Literal["none", "attention"] = "none"
    guide: Literal["sample", "prediction"] = "sample"

    def weight_at(self, noise: float) -> float:
        """Returns the guide's weight where that share of the model's input is noise."""
        left = (noise - self.until) / (1 - self.until)
        return self.weight * left**self.power if left > 0 else 0.0

    def stale(self) -> str:
        """Says what is old, and how it is read."""
        return "from the second step on, the small picture's estimate is one step old"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose latents are not known to keep their meaning when scaled."""
        if adapter.model == "PixArtTransformer2DModel" and self.mask == "attention":
            return "its text has no first token for positions that attend to nothing in it; use mask='none'"
        if adapter.model in MODELS:
            return None
        return f"it is known for Stable Diffusion, Flux, Qwen-Image and PixArt only; {adapter.instead}"

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> GuidedPatches:
        """Returns which rank computes which patch."""
        return GuidedPatches(mesh.axis("patch"))


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Describes how a latent is cut into patches.

    Attributes:
        factor: how many times larger the picture is than the small one, in each dimension.
        patch: height and width of a patch, which are the small picture's too.
        rows: first row of each patch from top to bottom.
        columns: first column of each patch from left to right.
    """

    factor: int
    patch: tuple[int, int]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def places(self) -> list[tuple[slice, slice]]:
        """Lists the rows and columns of every patch."""
        height, width = self.patch
        corners = itertools.product(self.rows, self.columns)
        return [(slice(top, top + height), slice(left, left + width)) for top, left in corners]

    def blend(self, parts: Sequence[Tensor], whole: Tensor) -> Tensor:
        """Puts patches, in the order of `places`, together in `whole`: where they overlap, a mean weighted by ramps."""
        sides = zip((self.rows, self.columns), self.patch, strict=True)
        down, across = ([ramp.to(whole) for ramp in ramps(starts, size)] for starts, size in sides)
        weights = [vertical[:, None] * horizontal for vertical, horizontal in itertools.product(down, across)]
        return blend(parts, self.places, weights, whole)


def grid_for(
    size: tuple[int, int], trained: tuple[int, int], overlap: float, multiple: int = 1, step: int = 1
) -> PatchGrid:
    """Lays out the patches of a latent.

    They have the shape of the picture and, as near as whole factors allow, the area of the training size.

    Args:
        size: height and width of the latent.
        trained: height and width the model was trained on.
        overlap: share of a patch's side that it has in common with the next one, at least.
        multiple: the patches' sides are multiples of it.
        step: the patches begin at multiples of it, which divides `multiple`.

    Raises:
        UnsupportedError: the picture cannot be scaled down to about the training size by a whole factor.

    Example:
        >>> grid_for((32, 48), trained=(16, 16), overlap=0.25)
        PatchGrid(factor=2, patch=(16, 24), rows=(0, 8, 16), columns=(0, 12, 24))
    """
    factor = max(1, round(math.sqrt(math.prod(size) / math.prod(trained))))
    if factor > 1 and any(side % (factor * multiple) for side in size):
        wanted = factor * multiple
        nearest = " x ".join(str(max(1, round(side / wanted)) * wanted) for side in size)
        raise UnsupportedError(
            f"StructureGuidance: latents of {size[0]} x {size[1]} are no multiple of {wanted}, {factor} times a small "
            f"picture whose sides are multiples of {multiple}; use {nearest} latents, or another training_size"
        )
    patch = cast(tuple[int, int], tuple(side // factor for side in size))
    rows, columns = (_starts(side, part, overlap, step) for side, part in zip(size, patch, strict=True))
    return PatchGrid(factor, patch, rows, columns)


def _starts(side: int, part: int, overlap: float, step: int) -> tuple[int, ...]:
    """Returns the starts of the fewest evenly spread parts that cover a side with the overlap."""
    if step > 1:
        return tuple(step * start for start in _starts(side // step, part // step, overlap, 1))
    count = math.ceil((side - part) / max(1, int(part * (1 - overlap) + 1e-9)))
    return even_starts(side, part, count + 1)


class GuidedPatches(Cut):
    """Distributes the patches and the small picture over the ranks, and shares the results.

    Patches are assigned in turn, and then the small picture, so it goes to a rank with one patch less if there is one.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.grid = PatchGrid(1, (1, 1), (0,), (0,))
        self.weights: tuple[float, ...] = ()
        self._patch_bytes = self._small_bytes = 0

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns how many patches each rank holds."""
        return {"patches": tuple(len(self._numbers(rank)) for rank in range(self.axis.size))}

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is cut."""
        return " and ".join(f"{total} {stream}" for stream, total in tokens.items())

    def attach(self, hooks: HookSet) -> None:
        """Does nothing: a patch is a picture to the model."""

    def begin_forward(self, latents: Any) -> None:
        """Does nothing: no call is cut inside the model."""

    def lay_out(self, grid: PatchGrid, weights: Sequence[float]) -> None:
        """Begins a generation, in which the guide has a weight in every step."""
        self.grid, self.weights = grid, tuple(weights)
        self._patch_bytes = self._small_bytes = 0

    @property
    def mine(self) -> range:
        """Returns the numbers of this rank's patches."""
        return self._numbers(self.axis.index)

    @property
    def has_small(self) -> bool:
        """Says whether this rank computes the small picture."""
        return self.axis.index == self._owner

    def needs_small(self, step: int) -> bool:
        """Says whether a step's estimate of the small picture is used, in the next step or, at the start, in this."""
        return self.grid.factor > 1 and any(self.weights[step + 1 if step else 0 : step + 2])

    def share_patches(self, parts: Sequence[Tensor], like: Tensor, *, is_first: bool) -> tuple[list[Tensor], Pending]:
        """Sends this rank's patches to all others and returns at once.

        Args:
            parts: this rank's patches, each of the shape of `like`.
            like: a patch.
            is_first: whether it is the first call of the model in this step.

        Returns:
            Every patch in the order of the grid, to be read after the wait.
        """
        self._patch_bytes = like.nbytes + (0 if is_first else self._patch_bytes)
        numbers = [self._numbers(rank) for rank in range(self.axis.size)]
        sizes = [len(each) for each in numbers]
        buffer = like.new_empty((sum(sizes), *like.shape))
        rows = dict(zip(itertools.chain(*numbers), buffer, strict=True))
        for number, part in zip(self.mine, parts, strict=True):
            rows[number].copy_(part)
        pending = all_gather(self.axis, buffer, sizes, name="guided patches")
        return [rows[number] for number in range(len(rows))], pending

    def share_small(self, estimate: Tensor) -> Pending:
        """Sends the small picture's estimate to all others, or receives it into `estimate`; returns at once."""
        self._small_bytes = estimate.nbytes
        others = [rank for rank in range(self.axis.size) if rank != self._owner]
        sends = dict.fromkeys(others, estimate) if self.has_small else {}
        recvs = {} if self.has_small else {self._owner: estimate}
        return exchange(self.axis, sends, recvs, name="small picture")

    def predict(
        self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool] = (0, False)
    ) -> int:
        """Returns the bytes a rank sends in a step."""
        small = self._small_bytes if index == self._owner and self.needs_small(step[0]) else 0
        return (len(self._numbers(index)) * self._patch_bytes + small) * (self.axis.size - 1)

    @property
    def _owner(self) -> int:
        return len(self.grid.places) % self.axis.size

    def _numbers(self, rank: int) -> range:
        return range(rank, len(self.grid.places), self.axis.size)
