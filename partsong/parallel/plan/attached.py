"""Defines what all plans have in common: they are context managers that undo themselves, and refuse use afterwards."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from partsong.errors import ArgumentError

__all__ = ["Attached"]


class Attached(Protocol):
    """Describes strategies that are attached to something; implementations inherit the rest.

    Attributes:
        is_undone: whether they were taken off for good.
    """

    is_undone: bool

    def undo(self) -> None:
        """Takes everything off; may be called again."""
        ...

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        ...

    def check_attached(self) -> None:
        """Refuses the use of a plan that was undone."""
        if self.is_undone:
            raise ArgumentError("this plan was undone, and nothing would be shared out; call parallelize() again")

    def __enter__(self) -> Self:
        self.check_attached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        self.undo()
