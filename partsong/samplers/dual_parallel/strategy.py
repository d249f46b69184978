"""Sends blocks of a long video through stages of layers, in a queue of falling noise (arXiv 2505.21070)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.stage_sizes import Layers, check_layers
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Kind, Strategy
from partsong.samplers.long_video.staged_frames import StagedFrames

__all__ = ["DualParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DualParallel(Strategy):
    """Cuts a long video into blocks of frames that follow each other through the steps, and the layers over ranks.

    At any time many blocks are active, each one step noisier than the block before. A block is one short run of the
    model. It sees the last frames of the block before, at its own noise level, and the first frames of the block after,
    a little noisier. Every rank keeps their keys and values for its own layers, so nothing is computed twice. Messages
    are those of a pipeline of layers. There is no limit to the length: memory depends on the block and the number of
    steps, not on the video; where an autoencoder cannot decode in pieces, the latents are kept to the end. Every block
    sees the text as the first frames of a video do. The result does not depend on the number of ranks, to the last bit
    on a CPU.
    Approximate; a video that fits into one block is exact. Sample with `partsong.samplers.generate` or ``stream``.

    Use it when a video should be much longer than those the model was trained on.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        block_frames: latent frames of a block; the video's last may have fewer.
        context: latent frames seen of the block before and of the block after.
        admit_every: steps by which a block lags behind the one before. Higher values make the first block ready much
            sooner, hold fewer blocks at a time, and leave ranks idle when there are fewer blocks than ranks.
        previous: ``cached`` keeps the keys of a block's last frames at each of its steps for the block after, which
            takes memory for as many steps as there are; ``recomputed`` runs these frames again in front of the block
            after, which takes up to twice the time and traffic. `Plan.explain` names the memory of either.
        noise: ``pool`` lets neighbours begin with the same frames of noise in another order; ``independent`` draws
            every frame for itself.
        layers: blocks of layers of each rank; None distributes them evenly.

    Source: DualParal, arXiv 2505.21070.

    Example:
        >>> DualParallel(block_frames=8, admit_every=3).kind
        'approximate'
    """

    axes: ClassVar[tuple[str, ...]] = ("pipe",)
    kind: ClassVar[Kind] = "approximate"
    has_loop: ClassVar[bool] = True
    loops_alone: ClassVar[bool] = True

    degree: Count | None = None
    block_frames: Count = 8
    context: Annotated[int, Whole(0)] = 8
    admit_every: Count = 1
    previous: Literal["cached", "recomputed"] = "cached"
    noise: Literal["pool", "independent"] = "pool"
    layers: Layers | None = None

    def validate(self) -> None:
        """Refuses a context longer than a block, and a number of stages other than the degree."""
        super(DualParallel, self).validate()
        if self.context > self.block_frames:
            raise ArgumentError(
                f"DualParallel: context={self.context} frames of a neighbour with block_frames={self.block_frames}; "
                "use at most a block"
            )
        check_layers("DualParallel", self.layers, self.degree)

    def stale(self) -> str:
        """Says what is old, and how it is read."""
        late = "one step" if self.admit_every == 1 else f"{self.admit_every} steps"
        return f"{self.context} frames of the next block are seen {late} noisier than they are"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models that are not plain video transformers."""
        reasons = {
            "it works on rows of an image, not on tokens": adapter.rows,
            "no row says how its blocks follow each other": adapter.inferred,
            "its positions along time are not known to be relative": adapter.frames is None or not adapter.frames.turns,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        return None if reason is None else f"{reason}; {adapter.instead}"

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> StagedFrames | None:
        """Returns the layers of this rank; all of them where there is one rank.

        Raises:
            UnsupportedError: positions of frames that are computed again are not known.
        """
        given = None if adapter.frames is None else adapter.frames.positions
        if self.previous == "recomputed" and given is not None:
            raise UnsupportedError(
                f"{adapter.model}: its pipeline gives the positions of a block's own frames ({given}), not of those "
                "computed again in front of it; use DualParallel(previous='cached')"
            )
        return StagedFrames(module, adapter, mesh, self.layers)
