"""Combines Ulysses within fast groups of ranks with a ring between the groups (arXiv 2405.07719)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partsong.knobs import Count
from partsong.parallel.attention_call import Stage
from partsong.parallel.exchange.ring import ring_stage
from partsong.parallel.exchange.ulysses import UlyssesStage
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.exchange.wires import WireName, wire_of
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh

__all__ = ["Usp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usp(Wired):
    """Runs Ulysses over neighbouring ranks and a ring over the groups they form. Exact.

    Use it when there are more ranks than heads, or several machines with fast links inside each.

    Args:
        ulysses_degree: ranks that share heads; None takes what the ring leaves.
        ring_degree: groups in the ring; None takes what Ulysses leaves. With both None the ring gets 2 groups when the
            number of ranks divides by 4, and else 1.
        wire: ``fp8`` and ``int8`` round what travels, as in `Ulysses` and `Ring`, which is approximate. To send
            residuals in the ring, compose these two.

    Source: USP, arXiv 2405.07719.
    """

    axes: ClassVar[tuple[str, ...]] = ("ring", "ulysses")
    uneven_axes: ClassVar[tuple[str, ...]] = ("ring", "ulysses")
    travels: ClassVar[str] = "queries, keys, values and outputs"

    ulysses_degree: Count | None = None
    ring_degree: Count | None = None
    wire: WireName = "none"

    def wanted(self) -> dict[str, int | None]:
        """Returns the two degrees."""
        return {"ring": self.ring_degree, "ulysses": self.ulysses_degree}

    def share(self, ranks: int) -> dict[str, int]:
        """Distributes `ranks` ranks over the degrees that are None; if both are, it prefers a ring of 2 groups."""
        if self.ulysses_degree is None and self.ring_degree is None:
            ring = 2 if ranks % 4 == 0 else 1
            return {"ring": ring, "ulysses": ranks // ring}
        return super(Usp, self).share(ranks)

    def stages(self, mesh: Mesh, clock: StepClock) -> list[Stage]:
        """Returns the attention stages this strategy adds to a plan, outermost call first."""
        inside = UlyssesStage(mesh.axis("ulysses"), wire=wire_of(self.wire))
        return [inside, ring_stage(mesh.axis("ring"), clock, self.wire)]
