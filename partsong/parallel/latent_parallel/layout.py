"""Lays out the parts of a latent: along which dimension each step cuts it, and where its parts begin."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.overlaps import even_starts
from partsong.parallel.cuts.token_grid import Lengths

__all__ = ["DIMS", "LatentCut", "NAMES", "PartRules"]

#: What these are called.
NAMES = ("frames", "rows", "columns")
#: The dimensions that a knob names.
DIMS: dict[str, tuple[int, ...]] = {
    "all": (0, 1, 2),
    "space": (1, 2),
    "time": (0,),
    "height": (1,),
    "width": (2,),
}


@dataclass(frozen=True, slots=True)
class LatentCut:
    """Says where the parts of a latent lie in a step, counted in patches.

    Attributes:
        dim: along which it is cut: 0 frames, 1 rows, 2 columns.
        length: of the latent along it.
        part: of each part.
        starts: where the parts begin.
    """

    dim: int
    length: int
    part: int
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRules:
    """Holds what the parts of a latent depend on besides its size. The number of ranks is not among it.

    Attributes:
        parts: how many parts there are.
        overlap: share of a part that it has in common with the next one, at least; 1 makes every part the whole.
        dims: which dimensions take turns.
        warmup_steps: first steps that compute the whole latent.

    Example:
        >>> rules = PartRules(parts=2, overlap=0.25, dims=(0, 1, 2), warmup_steps=0)
        >>> [(cut.dim, cut.part, cut.starts) for cut in rules.cuts("a model", (1, 7, 14))]
        [(1, 4, (0, 3)), (2, 8, (0, 6))]
    """

    parts: int
    overlap: float
    dims: tuple[int, ...]
    warmup_steps: int

    def cuts(self, model: str, lengths: Lengths) -> tuple[LatentCut, ...]:
        """Lists the cuts of the steps that take turns; none where every part would be the whole latent.

        Dimensions with fewer patches than there are parts are left out, and those in which a part is the whole.

        Args:
            model: class name, for messages.
            lengths: of the latent, in patches.

        Raises:
            UnsupportedError: no dimension has as many patches as there are parts.
        """
        return _cuts(self, model, lengths)

    def part(self, length: int) -> int:
        """Returns the shortest part with which so many cover a length, and overlap as much as they should."""
        return math.ceil(length / (self.parts - self.overlap * (self.parts - 1)) - 1e-9)


@functools.lru_cache(maxsize=64)  # every call of the model asks
def _cuts(rules: PartRules, model: str, lengths: Lengths) -> tuple[LatentCut, ...]:
    if rules.overlap == 1:
        return ()
    fitting = [dim for dim in rules.dims if lengths[dim] >= rules.parts]
    if not fitting:
        sizes = " and ".join(f"{lengths[dim]} {NAMES[dim]}" for dim in rules.dims)
        raise UnsupportedError(
            f"{model}: {sizes} of patches cannot be cut into {rules.parts} parts; use at most "
            f"{max(lengths[dim] for dim in rules.dims)} ranks and parts, or a larger picture"
        )
    lengths_of_parts = {dim: rules.part(lengths[dim]) for dim in fitting}
    return tuple(
        LatentCut(dim, lengths[dim], part, even_starts(lengths[dim], part, rules.parts))
        for dim, part in lengths_of_parts.items()
        if part < lengths[dim]
    )
