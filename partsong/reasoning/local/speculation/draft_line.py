"""Defines what the rank with the model and the rank that drafts say to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from partsong.errors import ArgumentError, PartsongError
from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.speculation.draft import DraftTree
from partsong.parallel.ranks.launch import portable
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.ranks.objects import ObjectInbox, apart, receive_object, send_object

__all__ = [
    "DraftHandshake",
    "DraftLine",
    "DraftOrder",
    "DraftOutcome",
    "DraftReply",
    "HowDrafted",
    "axis_of_two",
    "refusal_of",
]

#: How a draft came about: all of it was prepared, a prepared one was too short and grew while the other rank waited,
#: nothing was prepared, or the prompt was not read yet.
HowDrafted = Literal["hit", "deepened", "miss", "unread"]


@dataclass(frozen=True, slots=True)
class DraftHandshake:
    """Says which model is drafted for.

    Attributes:
        vocabulary: its tokens and their numbers.
        num_weights: its size.
    """

    vocabulary: Mapping[str, int]
    num_weights: int


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Says how a text went on.

    Attributes:
        number: the text's; a new one begins a text.
        tokens: those since the last order; at first the prompt and the first tokens of the answer.
        draw: how the next token is drawn.
        room: how many tokens may be guessed.
    """

    number: int
    tokens: tuple[int, ...]
    draw: TokenDraw
    room: int


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Asks for the drafts of a step.

    Attributes:
        texts: the texts of the step.
        forgotten: numbers of texts that have ended.
        ends: whether nothing is asked for any more.
    """

    texts: tuple[DraftOutcome, ...] = ()
    forgotten: tuple[int, ...] = ()
    ends: bool = False


@dataclass(frozen=True, slots=True)
class DraftReply:
    """Answers an order.

    Attributes:
        drafts: for each text the tokens, parents and chances of its draft.
        how: how each came about.
        error: why there are no drafts.
    """

    drafts: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]], ...] = ()
    how: tuple[HowDrafted, ...] = ()
    error: BaseException | None = None

    def trees(self) -> list[DraftTree]:
        """Returns the drafts."""
        return [DraftTree(*draft) for draft in self.drafts]


class DraftLine:
    """Takes orders from the first rank of an axis to the second, and replies back.

    Args:
        axis: the two ranks, whose messages lie in the host's memory.
    """

    def __init__(self, axis: Axis) -> None:
        self._orders, self._replies = apart(axis), apart(axis)
        self._inbox: ObjectInbox | None = None

    def order(self, order: DraftOrder | DraftHandshake) -> None:
        """Sends an order to the rank that drafts.

        Raises:
            DistributedError: that rank is gone.
        """
        send_object(self._orders, 1, order, name="an order of drafts")

    def reply(self) -> DraftReply:
        """Waits for the reply.

        Raises:
            DistributedError: the rank that drafts is gone.
        """
        return receive_object(self._replies, 1, name="drafts")

    def expect(self) -> ObjectInbox:
        """Begins to wait for the next order."""
        if self._inbox is None:
            self._inbox = ObjectInbox(self._orders, 0, name="an order of drafts")
        self._inbox.ask()
        return self._inbox

    def answer(self, reply: DraftReply) -> None:
        """Sends a reply to the rank with the model, which waits for it.

        Raises:
            DistributedError: that rank is gone.
        """
        send_object(self._replies, 0, reply, name="drafts")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Sends an error as the reply, so that the rank that waits for one learns of it, and raises it here, too."""
        try:
            yield
        except Exception as error:
            self.answer(DraftReply(error=portable(error)))
            raise

    def close(self) -> None:
        """Waits for no further order."""
        if self._inbox is not None:
            self._inbox.close()


def axis_of_two(mesh: Mesh | None, index: int) -> Axis:
    """Returns the axis of the rank with the model and the rank that drafts, whose messages lie in the host's memory.

    Args:
        mesh: the ranks.
        index: which of the two this rank should be.

    Raises:
        ArgumentError: there are not two ranks along ``pipe``, or this is the other one.
    """
    wanted = "give mesh=Mesh(pipe=2), whose first rank has the model and whose second one drafts"
    if mesh is None:
        raise ArgumentError(f"Saguaro drafts on a rank of its own, and has mesh=None; {wanted}")
    if mesh.world_size != 2 or mesh.axis("pipe").size != 2:
        raise ArgumentError(f"Saguaro takes two ranks along pipe, and has {mesh!r}; {wanted}")
    axis = mesh.on_host("pipe")
    if axis.index != index:
        call = "make the engine with speculate=Saguaro(...)" if index else "call serve_drafts(Saguaro(...))"
        raise ArgumentError(f"rank {axis.index} was given the work of rank {index}; {call} here")
    return axis


def refusal_of(error: BaseException) -> str:
    """Says in one line what ended the rank that drafts."""
    text = str(error) if isinstance(error, PartsongError) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
