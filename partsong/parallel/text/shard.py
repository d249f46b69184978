"""Says which tokens of a vocabulary a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets

__all__ = ["SHARD", "VocabularyShard", "shard_of"]

#: The attribute of an output embedding that says which tokens it holds.
SHARD = "partsong_vocabulary"


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Says which tokens of a vocabulary this rank holds.

    Attributes:
        axis: the ranks.
        sizes: tokens of each.
    """

    axis: Axis
    sizes: tuple[int, ...]

    @property
    def first(self) -> int:
        """Returns the first token that this rank holds."""
        return offsets(self.sizes)[self.axis.index]

    @property
    def size(self) -> int:
        """Counts the tokens that it holds."""
        return self.sizes[self.axis.index]

    @property
    def total(self) -> int:
        """Counts the tokens of all ranks."""
        return sum(self.sizes)

    def mine(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor `[V, ...]`."""
        return whole.narrow(0, self.first, self.size)


def shard_of(model: Any) -> VocabularyShard | None:
    """Returns which tokens a model's head holds; None where it holds all of them."""
    return vars(model.get_output_embeddings() or nn.Module()).get(SHARD)
