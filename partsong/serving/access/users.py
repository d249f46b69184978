"""Knows who may use a server, by the key that they show, and how much of it each of them may have at a time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from partsong.errors import ArgumentError
from partsong.serving.errors import ApiError

__all__ = ["LEAST_KEY", "OPERATOR", "User", "Users", "check_key"]

#: Minimum length of a key where others can reach the server.
LEAST_KEY = 16


class OwnedWork(Protocol):
    """Describes what somebody has asked for: a job, or a session."""

    user: str

    @property
    def has_ended(self) -> bool:
        """Says whether it is over."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Describes somebody who may use a server.

    Attributes:
        name: in jobs, metrics and the log; empty for who has the server's own key, and for anybody where none is asked.
        is_operator: whether they see the jobs of all users, and may restart ranks.
        jobs: most jobs of pictures and videos that wait or run for them; None for no bound.
        requests: most requests of theirs that are answered at a time, streams included; None for no bound.
    """

    name: str
    is_operator: bool = False
    jobs: int | None = None
    requests: int | None = None

    def sees(self, owner: str) -> bool:
        """Says whether what belongs to a user of that name is theirs to see."""
        return self.is_operator or owner == self.name

    def check_jobs(self, jobs: Iterable[OwnedWork]) -> None:
        """Refuses a further job while too many of this user wait or run.

        Raises:
            ApiError: says how many there are.
        """
        if self.jobs is None:
            return
        unfinished = sum(job.user == self.name and not job.has_ended for job in jobs)
        if unfinished >= self.jobs:
            message = f"{unfinished} jobs of {self.name} wait or run already, and {self.jobs} may; try again later"
            raise ApiError(429, message, code="user_jobs", retry_after=5.0)


#: Who has the server's own key, and anybody where no key is asked.
OPERATOR = User(name="", is_operator=True)


class Users:
    """Holds the users of a server by their keys; without any, everybody is the operator.

    Args:
        by_key: the users.

    Example:
        >>> users = Users({"a-key-of-enough-length": User(name="ada")})
        >>> users.find(b"a-key-of-enough-length").name, users.find(b"another")
        ('ada', None)
    """

    def __init__(self, by_key: Mapping[str, User] | None = None) -> None:
        self._by_digest = {_digest(key.encode()): user for key, user in (by_key or {}).items()}

    @property
    def is_open(self) -> bool:
        """Says whether no key is asked."""
        return not self._by_digest

    def find(self, key: bytes) -> User | None:
        """Returns who has a key; how long it takes tells nothing of the keys."""
        if self.is_open:
            return OPERATOR
        asked, owner = _digest(key), None
        for digest, user in self._by_digest.items():
            if hmac.compare_digest(digest, asked):
                owner = user
        return owner


def check_key(key: str, whose: str) -> str:
    """Returns a key without the space around it.

    Args:
        key: the key.
        whose: names it in the error.

    Raises:
        ArgumentError: it is short.
    """
    key = key.strip()
    if len(key) < LEAST_KEY:
        raise ArgumentError(f"{whose} has {len(key)} characters; use at least {LEAST_KEY}")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
