"""Lets the ranks that share a model take the same steps: before each of them the first rank says what has changed."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.ranks.objects import share_object
from partsong.reasoning.calls.call import Request

__all__ = ["Lockstep", "OpenCall", "LockstepTurn"]


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Says what a call asks.

    Attributes:
        number: which of the engine's calls it is.
        request: the request.
        plain: whether it is read without the chat template.
    """

    number: int
    request: Request
    plain: bool = False


@dataclass(frozen=True, slots=True)
class LockstepTurn:
    """Says which calls come and go before a step.

    Attributes:
        arrived: new ones.
        cancelled: numbers of those whose callers have left.
        ends: whether this was the last turn.
    """

    arrived: tuple[OpenCall, ...] = ()
    cancelled: tuple[int, ...] = ()
    ends: bool = False


class Lockstep:
    """Sends all ranks the turns of the first one.

    Args:
        mesh: the ranks; all of them take part.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axis = mesh, mesh.on_host(*AXES)

    def share(self, turn: LockstepTurn | None) -> LockstepTurn:
        """Returns the first rank's turn on every rank; the others give None.

        Raises:
            DistributedError: a rank is gone, or stopped at another point than the others.
        """
        return share_object(self._axis, turn, name="the engine's next turn")

    def note_failure(self) -> None:
        """Notes that a step failed here: the next turn is only shared if it failed on all ranks alike."""
        self._mesh.abandon()
