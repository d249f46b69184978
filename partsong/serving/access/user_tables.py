"""Reads the tables of users that an operator writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from partsong.errors import ArgumentError
from partsong.serving.access.users import User, check_key
from partsong.serving.errors import invalid

__all__ = ["read_users"]


class _Table(BaseModel):
    """Describes one user."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    key: str | None = None
    key_file: str | None = None
    operator: bool = False
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    max_requests: Annotated[int, Field(ge=1)] | None = None


def read_users(tables: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, User]:
    """Returns users by their keys.

    Args:
        tables: of ``name``, ``key`` or ``key_file``, and perhaps ``operator``, ``max_jobs`` and ``max_requests``.
        folder: to which names of key files are relative.

    Raises:
        ArgumentError: a table is wrong or incomplete, or two have one name or key.
    """
    users: dict[str, User] = {}
    for number, given in enumerate(tables, 1):
        try:
            table = _Table.model_validate(given)
        except ValidationError as error:
            raise ArgumentError(f"[[users]] {number}: {invalid(error.errors()[0])}") from None
        key = check_key(_key_of(table, folder), f"the key of user {table.name}")
        if key in users or table.name in {user.name for user in users.values()}:
            raise ArgumentError(f"user {table.name} has the name or the key of another one; each has its own")
        users[key] = User(name=table.name, is_operator=table.operator, jobs=table.max_jobs, requests=table.max_requests)
    return users


def _key_of(table: _Table, folder: Path) -> str:
    if (table.key is None) == (table.key_file is None):
        raise ArgumentError(f"user {table.name} has either a key or a key_file; write one of them")
    if table.key is not None:
        return table.key
    try:
        return (folder / str(table.key_file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"key_file of user {table.name} cannot be read as text: {error}") from error
