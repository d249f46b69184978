"""Keeps responses of ``/v1/responses`` in memory, up to a bound, so that later ones can follow them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from partsong.serving.access.users import User
from partsong.serving.errors import ApiError, shortened

__all__ = ["KeptResponse", "ResponseStore"]


@dataclass(kw_only=True, slots=True)
class KeptResponse:
    """Holds a response.

    Attributes:
        reply: it, as clients read it.
        turns: role and text of the messages so far, its own answer included once it is there.
        owner: name of the user whose it is.
        task: answers it in the background; None elsewhere.
    """

    reply: dict[str, Any]
    turns: tuple[tuple[str, str], ...]
    owner: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Counts the characters of its messages."""
        return sum(len(text) for _, text in self.turns)


class ResponseStore:
    """Keeps responses by name, and forgets the oldest when there are too many or when they hold too much.

    Args:
        most: number of responses.
        characters: of all their messages.
    """

    def __init__(self, most: int = 1000, characters: int = 50_000_000) -> None:
        self._most, self._characters = most, characters
        self._kept: dict[str, KeptResponse] = {}

    def keep(self, kept: KeptResponse) -> None:
        """Keeps a response, in place of one of the same name."""
        self._kept[kept.reply["id"]] = kept
        size = sum(each.size for each in self._kept.values())
        for name in list(self._kept)[:-1]:
            if len(self._kept) <= self._most and size <= self._characters:
                return
            size -= self._kept[name].size
            self.remove(name)

    def find(self, name: str, user: User, param: str | None = None) -> KeptResponse:
        """Returns a response.

        Args:
            name: of the response.
            user: who asks for it.
            param: the field of the request that names it, for the error.

        Raises:
            ApiError: it is not kept, or is another user's.
        """
        if name not in self._kept or not user.sees(self._kept[name].owner):
            message = f"there is no response {shortened(name)}; this server keeps the last {self._most} until it ends"
            raise ApiError(
                400 if param else 404,
                message,
                param=param,
                code="previous_response_not_found" if param else "not_found",
            )
        return self._kept[name]

    def remove(self, name: str) -> None:
        """Forgets a response, and stops what still answers it."""
        kept = self._kept.pop(name)
        if kept.task is not None:
            kept.task.cancel()
