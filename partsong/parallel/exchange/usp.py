"""Unified sequence parallelism: Ulysses within fast groups, a ring between them (arXiv 2405.07719)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partsong.knobs import Count
from partsong.parallel.attention_call import Stage
from partsong.parallel.exchange.ring import RingStage
from partsong.parallel.exchange.ulysses import UlyssesStage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["Usp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usp(Strategy):
    """Ulysses over neighbouring ranks and a ring over the groups they form. Exact.

    Args:
        ulysses_degree: ranks sharing heads; None is what the ring leaves.
        ring_degree: groups in the ring; None is what Ulysses leaves. With both None the ring gets 2 when the ranks
            divide by 4, else 1.

    Source: USP, arXiv 2405.07719.

    Example:
        >>> Usp(ulysses_degree=2, ring_degree=2).share(4)
        {}
    """

    axes: ClassVar[tuple[str, ...]] = ("ring", "ulysses")

    ulysses_degree: Count | None = None
    ring_degree: Count | None = None

    def wanted(self) -> dict[str, int | None]:
        """The two degrees."""
        return {"ring": self.ring_degree, "ulysses": self.ulysses_degree}

    def share(self, ranks: int) -> dict[str, int]:
        """Fills the open degrees from `ranks`, which the given one has already been divided out of."""
        if self.ulysses_degree is None and self.ring_degree is None:
            ring = 2 if ranks % 4 == 0 else 1
            return {"ring": ring, "ulysses": ranks // ring}
        return {axis: ranks for axis, degree in self.wanted().items() if degree is None}

    def stages(self, mesh: Mesh, clock: StepClock) -> list[Stage]:
        """The attention stages this strategy adds to a plan, outermost call first."""
        return [UlyssesStage(mesh.axis("ulysses")), RingStage(mesh.axis("ring"))]
