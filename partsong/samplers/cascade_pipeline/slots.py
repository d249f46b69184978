"""Says which blocks are in flight in each slot of a cascade, and which rank works on each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cascade", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Holds the blocks in flight in one slot.

    Attributes:
        number: of the slot.
        steps: the step of each block, oldest first; that after the last step is its clean call.
        num_steps: denoising steps.
        ranks: that share the blocks.
    """

    number: int
    steps: dict[int, int]
    num_steps: int
    ranks: int

    @property
    def clean(self) -> int | None:
        """Returns the block that makes its clean call; None where there is none."""
        return next((block for block, step in self.steps.items() if step == self.num_steps), None)

    @property
    def ended(self) -> int | None:
        """Returns the block that makes its last step; None where there is none."""
        return next((block for block, step in self.steps.items() if step == self.num_steps - 1), None)

    def of(self, rank: int) -> list[int]:
        """Lists the blocks of a rank, oldest first."""
        return [block for block in self.steps if block % self.ranks == rank]

    @property
    def working(self) -> list[int]:
        """Lists the ranks that have blocks."""
        return [rank for rank in range(self.ranks) if self.of(rank)]

    @property
    def turns(self) -> int:
        """Returns the most blocks that a rank has."""
        return max(len(self.of(rank)) for rank in range(self.ranks))


@dataclass(frozen=True, slots=True)
class Cascade:
    """Describes when the blocks of a video make their steps.

    Attributes:
        blocks: how many the video has.
        steps: denoising steps of each.
        depth: the most blocks that are denoised together.
        ranks: that share them.

    Example:
        >>> cascade = Cascade(blocks=3, steps=4, depth=2, ranks=1)
        >>> [cascade.slot(number).steps for number in (1, 2, 4)]
        [{0: 1}, {0: 2, 1: 0}, {0: 4, 1: 2, 2: 0}]
    """

    blocks: int
    steps: int
    depth: int
    ranks: int

    @property
    def lag(self) -> int:
        """Returns the slots by which a block starts after the block before."""
        return -(-self.steps // self.depth)

    @property
    def slots(self) -> int:
        """Counts the slots of the whole video."""
        return (self.blocks - 1) * self.lag + self.steps

    @property
    def most(self) -> int:
        """Returns the most blocks of a slot, that with its clean call among them."""
        return self.steps // self.lag + 1

    def slot(self, number: int) -> Slot:
        """Returns the blocks of a slot. The last block makes no clean call: nobody would read it."""
        oldest = max(0, -(-(number - self.steps) // self.lag))
        newest = min(self.blocks - 1, number // self.lag)
        steps = {block: number - block * self.lag for block in range(oldest, newest + 1)}
        return Slot(number, steps, self.steps, self.ranks)
