"""Defines the base of strategies that are exact unless a wire compresses what they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partsong.errors import ArgumentError
from partsong.parallel.exchange.wires import EIGHT_BIT, rounding
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["Wired"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wired(Strategy):
    """Moves tensors unchanged, which is exact, or compressed, which is approximate. Subclasses have the knob `wire`."""

    #: What is sent, for a line of `Plan.explain`.
    travels: ClassVar[str]
    #: Whether wires may carry residuals: both ends need a base from the previous step.
    takes_residuals: ClassVar[bool] = False
    # Not annotated, so it is not a field here: subclasses make it a knob, in its place among theirs.
    wire = "none"

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Returns ``exact`` if everything is sent unchanged."""
        return "exact" if self.wire == "none" else "approximate"

    def rounded(self) -> str | None:
        """Says what the wire compresses."""
        return rounding(self.wire, self.travels, self.warmup_steps)

    def validate(self) -> None:
        """Refuses residual wires where no base is kept for them."""
        super(Wired, self).validate()
        if not self.takes_residuals and self.wire not in ("none", *EIGHT_BIT):
            raise ArgumentError(
                f"{type(self).__name__}: wire={self.wire!r}; residuals need a base from the previous step at both "
                "ends, and this strategy moves queries and outputs too, which nobody keeps; use none, fp8 or int8, or "
                "Ring or DisplacedPatch"
            )
