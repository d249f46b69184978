"""Sums what the blocks of a model add to their inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from partsong.parallel.step_cache.history import Added

__all__ = ["Additions", "added_to", "as_returned"]


class Additions:
    """Sums what the blocks of every list add in one call, without what the model adds between two of them.

    Args:
        has_residuals: the model adds something between blocks, perhaps in place.

    Attributes:
        lists: what every list of blocks added, as far as its last block has returned.
    """

    def __init__(self, has_residuals: bool) -> None:
        self.lists: Added = []
        self._has_residuals = has_residuals
        self._start: tuple[Tensor, ...] = ()
        self._leaving: tuple[Tensor | None, ...] = ()
        self._sum: tuple[Tensor | None, ...] = ()

    def note(self, entering: tuple[Any, ...], leaving: tuple[Any, ...], is_last: bool) -> None:
        """Notes the input and the output of a block.

        Args:
            entering: what the block got.
            leaving: what it returned, in the same order; None where it returned nothing.
            is_last: whether it is the last of its list.
        """
        if len(entering) != len(self._leaving) or any(a is not b for a, b in zip(entering, self._leaving, strict=True)):
            self._close_run()
            self._start = entering
        self._leaving = leaving
        # Residuals may be added in place to the tensor that this block returned, which the next one gets.
        if is_last or self._has_residuals:
            self._close_run()
        if is_last:
            self.lists.append(self._sum)
            self._sum = ()

    def _close_run(self) -> None:
        if self._leaving:
            # A last block may return no text, since nothing reads it afterwards.
            pairs = zip(self._leaving, self._start, strict=True)
            added: tuple[Tensor | None, ...] = tuple(
                None if after is None else after - before for after, before in pairs
            )
            self._sum = added_to(self._sum, added) if self._sum else added
        self._start = self._leaving = ()


def added_to(values: tuple[Any, ...], more: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Adds what blocks add to what enters them; None where they return nothing."""
    return tuple(None if b is None else a + b for a, b in zip(values, more, strict=True))


def as_returned(values: tuple[Any, ...]) -> Any:
    """Returns values as a block does: a single value as it is, several as a tuple."""
    return values if len(values) > 1 else next(iter(values))
