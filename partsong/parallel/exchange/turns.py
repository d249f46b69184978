"""Plans the turns in which blocks go around ranks: one block in each, or twice as many in each as in the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from partsong.errors import ArgumentError
from partsong.parallel.exchange.wired import Wired
from partsong.parallel.ranks.mesh import Axis

__all__ = ["Blocks", "Turn", "doubles", "refuse_doubling", "turns_of"]

#: What a turn moves: ``auto`` doubles where the links are those of GPUs and blocks are short.
Blocks = Literal["auto", "one", "doubling"]

#: A block of attention is short below so many tiles of 128 queries and 128 keys. At a width of 128 they are 7 GFLOP,
#: which a fast GPU computes in 15 microseconds; its host takes 100 to begin a turn.
_TILE, SHORT = 128, 800


@dataclass(frozen=True, slots=True)
class Turn:
    """Describes one exchange. Block j of a rank is the one of the rank j places before it.

    Attributes:
        first: the first block that arrives.
        count: how many arrive.
        hop: they come from the rank so many places before, and as many leave for the rank so many places after.
    """

    first: int
    count: int
    hop: int

    @property
    def sent(self) -> range:
        """Returns the blocks that leave: the ones that are to arrive there."""
        return range(self.first - self.hop, self.first - self.hop + self.count)

    @property
    def arriving(self) -> range:
        """Returns the blocks that arrive."""
        return range(self.first, self.first + self.count)


def turns_of(size: int, *, doubling: bool) -> tuple[Turn, ...]:
    """Plans the turns after which every rank has had the blocks of all.

    One by one every message goes to the next rank. Doubled, there are fewer and larger messages, to ranks further away
    (Bruck's algorithm): for as many bytes, eight ranks take three turns instead of seven.

    >>> [(turn.first, turn.count) for turn in turns_of(6, doubling=True)]
    [(1, 1), (2, 2), (4, 2)]
    """
    if not doubling:
        return tuple(Turn(block, 1, 1) for block in range(1, size))
    firsts = [1 << power for power in range((size - 1).bit_length())]
    return tuple(Turn(first, min(first, size - first), first) for first in firsts)


def doubles(blocks: Blocks, axis: Axis, sizes: Sequence[int], heads: int) -> bool:
    """Says whether turns double, the same on all ranks.

    Args:
        blocks: the knob.
        axis: the ranks.
        sizes: tokens of each.
        heads: query heads, times samples.
    """
    if blocks != "auto":
        return blocks == "doubling"
    rows = max(sizes) / _TILE
    return axis.is_fused and axis.size > 2 and rows * rows * heads < SHORT


def refuse_doubling(strategy: Wired, blocks: Blocks) -> None:
    """Refuses doubled messages of compressed blocks.

    Raises:
        ArgumentError: a wire together with doubling.
    """
    if blocks == "doubling" and strategy.wire != "none":
        raise ArgumentError(
            f"{type(strategy).__name__}: blocks='doubling' with wire={strategy.wire!r}; compressed blocks travel one "
            "by one, so leave one of the two out"
        )
