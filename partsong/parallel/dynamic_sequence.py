"""Dynamic sequence parallelism: frames or tokens are cut, whichever the next block does not mix (arXiv 2403.10266)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy
from partsong.parallel.switched_blocks import SwitchedBlocks

__all__ = ["DynamicSequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSequence(Strategy):
    """Cuts a video's frames for spatial blocks and their tokens for temporal ones. Exact.

    Where a model attends within frames in some blocks and along time in others, no attention needs two ranks as long
    as the dimension it mixes is whole: a rank has some frames with all of their tokens in a spatial block, and some
    tokens of all frames in a temporal one. Between the two one all-to-all exchanges hidden states; text, norms and
    feed-forward layers are local. Any number of heads and frames, fewer frames than ranks too; each frame needs at
    least as many tokens as there are ranks.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: DSP, arXiv 2403.10266.

    Example:
        >>> DynamicSequence(degree=2).kind
        'exact'
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses",)

    degree: int | None = None

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models whose blocks are not told apart into spatial and temporal ones."""
        reason = super(DynamicSequence, self).refuses(adapter)
        if reason is None and adapter.factored is None:
            return "it has no blocks for space and others for time to switch between; use Ulysses"
        return reason

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> SwitchedBlocks | None:
        """The switching blocks of this rank; None where one rank has all frames.

        Raises:
            UnsupportedError: another strategy cuts the tokens as well.
        """
        if mesh.axis("ulysses").size == 1:
            return None
        others = [axis for axis in TOKEN_AXES if axis != "ulysses" and mesh.degrees[axis] > 1]
        if others:
            raise UnsupportedError(
                f"DynamicSequence leaves no attention over several ranks for the mesh axis {' and '.join(others)}; "
                "give its ranks to DynamicSequence, CfgParallel or DataParallel"
            )
        return SwitchedBlocks(module, adapter, mesh)
