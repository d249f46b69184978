"""Defines the errors a user of partsong can meet.

Every one derives from `PartsongError` and from the built-in a caller would expect, so both
``except PartsongError`` and ``except ValueError`` work. A message says what was asked, what was found and what
to change.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DistributedError",
    "NotANumberError",
    "PartsongError",
    "RankError",
    "UnsupportedError",
]


class PartsongError(Exception):
    """Is the base class of every error that partsong raises on purpose."""


class ArgumentError(PartsongError, ValueError):
    """Says that an argument cannot be used: a degree, a size, an unknown option, an unreadable folder."""


class ArgumentTypeError(PartsongError, TypeError):
    """Says that an argument is of the wrong type, such as a prompt that is not text."""


class UnsupportedError(PartsongError, ValueError):
    """Refuses a model, scheduler, mask or combination of strategies that has no correct parallel form here."""


class OutputError(PartsongError, OSError):
    """Says that a result could not be written to its end: the disk is full, or the place went away."""


class NotANumberError(PartsongError, ArithmeticError):
    """Says that a model computed NaN or infinite numbers, or has nothing left to choose from, so there is no result."""


class DistributedError(PartsongError, RuntimeError):
    """Says that an operation between ranks failed: a peer died, stopped answering, or asked for something else."""


class RankError(DistributedError):
    """Says that one rank failed and the run was ended on all of them.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int | None]]:
        return type(self), (str(self), self.rank)
