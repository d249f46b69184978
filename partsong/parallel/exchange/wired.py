"""Defines the base of strategies that are exact unless a wire rounds what they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from partsong.errors import ArgumentError
from partsong.parallel.exchange.wires import EIGHT_BIT, rounding
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["Wired"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wired(Strategy):
    """Moves something as it is, which is exact, or by a wire, which is approximate. Subclasses have the knob `wire`."""

    #: What travels, as a line of `Plan.explain` says it.
    travels: ClassVar[str]
    #: Whether wires may carry residuals: both ends need a base from the step before.
    takes_residuals: ClassVar[bool] = False
    # Not annotated, so that it is no field here: subclasses make a knob of it, in its place among theirs.
    wire = "none"

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Says that it is exact where everything travels as it is."""
        return "exact" if self.wire == "none" else "approximate"

    def rounded(self) -> str | None:
        """Says what travels by the wire."""
        return rounding(self.wire, self.travels, self.warmup_steps)

    def validate(self) -> None:
        """Refuses wires that carry residuals where nobody keeps a base for them."""
        super(Wired, self).validate()
        if not self.takes_residuals and self.wire not in ("none", *EIGHT_BIT):
            raise ArgumentError(
                f"{type(self).__name__}: wire={self.wire!r}; residuals need a base from the step before at both ends, "
                "and this strategy moves queries and outputs too, which nobody keeps; use none, fp8 or int8, or Ring "
                "or DisplacedPatch"
            )
