"""Finds the rank that caused a failure when several of them fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.errors import DistributedError, PartsongError, RankError

__all__ = ["BLAMED_GRACE", "ERROR_KEY", "GRACE", "RankReport", "first_cause", "is_blamed"]

#: Key in the store under which a rank notes which other one it waits for in vain.
ERROR_KEY = "partsong/error"
#: Seconds that the other ranks get to end after one has failed, in general and when the cause is known.
GRACE, BLAMED_GRACE = 5.0, 0.5


@dataclass(frozen=True, slots=True)
class RankReport:
    """Holds a rank's own report of how it ended.

    Attributes:
        value: what its function returned.
        error: what it raised; None where it returned.
        trace: traceback of the error, as text.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def is_blamed(store: Any) -> bool:
    """Says whether a rank has noted in the store which one it waits for in vain."""
    return store.check([ERROR_KEY])


def first_cause(
    failed: Sequence[int], reports: Mapping[int, RankReport], store: Any, died: Callable[[int], str]
) -> PartsongError:
    """Returns the error that ended a run.

    A rank that only lost its peers is a witness. The cause is the rank that was killed or raised another error.

    Args:
        failed: the ranks that raised an error or ended without a report.
        reports: of the ranks that could make one.
        store: of the rendezvous.
        died: says how a rank without a report ended, as the rest of a sentence that begins with its name.
    """

    def order(rank: int) -> tuple[int, int]:
        if (report := reports.get(rank)) is None:
            return (0, rank)
        # "connectFullMesh" is in gloo's error for peers that were gone before it had connected to them.
        lost = isinstance(report.error, DistributedError) or "connectFullMesh" in str(report.error)
        return (2 if lost else 1, rank)

    rank = min(failed, key=order)
    report = reports.get(rank)
    if report is None:
        if is_blamed(store):
            blamed, _, message = store.get(ERROR_KEY).decode().partition("|")
            return RankError(message, int(blamed))
        witnesses = [str(reports[other].error) for other in failed if other in reports]
        witness = f"; {witnesses[0]}" if witnesses else ""
        return RankError(f"rank {rank} {died(rank)}; the other ranks were ended{witness}", rank)
    error = report.error
    if not isinstance(error, PartsongError):
        error = RankError(f"rank {rank} failed: {type(error).__name__}: {error}", rank)
    error.add_note(f"raised on rank {rank}:\n{report.trace}")
    return error
