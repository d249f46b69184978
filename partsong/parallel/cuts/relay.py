"""Keeps several samples on their way through runs of a model's blocks, which are on one rank each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from partsong.parallel.cuts.handed_on import hand_on, share_output
from partsong.parallel.ranks.collectives import Pending
from partsong.parallel.ranks.mesh import Axis

__all__ = ["Relay"]

Part = TypeVar("Part")
Result = TypeVar("Result")


class Relay:
    """Takes samples through the ranks one after another: whoever has handed one on goes on with the next.

    Every rank calls its methods in the same order, with the right values where it has computed them and elsewhere with
    others of the same shapes.

    Args:
        axis: the ranks.
        name: what errors call a message.

    Attributes:
        owner: index of the rank that ran the last block of this sample; None before the first block.
        moved: bytes from a rank to a rank, by their indices.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        self.axis, self._name = axis, name
        self.owner: int | None = None
        self.moved: Counter[tuple[int, int]] = Counter()
        self._sent: list[Pending] = []

    def through(self, parts: Iterable[Part], run: Callable[[Part], Result]) -> list[Result]:
        """Runs all blocks on one sample after another."""
        results = list[Result]()
        for part in parts:
            self.owner = None
            results.append(run(part))
        return results

    def enter(self, owner: int, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns what enters a block, once it has come if this rank runs the block and another one the block before.

        Before the first block every rank has computed the same.
        """
        before, self.owner = self.owner, owner
        if before is None or before == owner:
            return values
        self.moved[before, owner] += sum(tensor.nbytes for tensor in values)
        values, pending = hand_on(self.axis, before, owner, values, name=self._name)
        if self.axis.index == owner:
            pending.wait()
        else:
            self._sent.append(pending)
        return values

    def share(self, owners: Sequence[int], outputs: Sequence[Any], *, name: str) -> list[Any]:
        """Sends every rank the outputs of calls from the ranks that have them, and waits for all that was sent."""
        whole = [share_output(self.axis, *each, name=name) for each in zip(owners, outputs, strict=True)]
        for pending in self._sent:
            pending.wait()
        self._sent.clear()
        return whole

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        self._sent.clear()
