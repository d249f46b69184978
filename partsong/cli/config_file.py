"""Reads a TOML file with the options of ``partsong serve`` and the users of the server."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from partsong.cli.serving_options import Serving
from partsong.errors import ArgumentError

__all__ = ["ConfigFile"]

#: Options that only a command line has.
_NOT_HERE = {"config", "debug", "json"}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Holds what a file says.

    Attributes:
        arguments: its options, as a command line has them.
        users: its tables of users.
        folder: its own folder, to which paths of keys are relative.
    """

    arguments: list[str]
    users: list[Mapping[str, Any]]
    folder: Path

    @staticmethod
    def read(path: str) -> ConfigFile:
        """Reads a file.

        Raises:
            ArgumentError: it cannot be read, or an option is unknown or has a value of another kind.
        """
        try:
            given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--config {path} cannot be read as TOML: {error}") from error
        users = given.pop("users", [])
        if not isinstance(users, list) or not all(isinstance(each, dict) for each in users):
            raise ArgumentError(f"{path}: users are tables; begin each with [[users]]")
        known = sorted({field.name for field in fields(Serving)} - _NOT_HERE)
        arguments = []
        for name, value in given.items():
            if (option := name.replace("-", "_")) not in known:
                near = get_close_matches(option, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ArgumentError(f"{path}: there is no option {name!r}; {hint}")
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, bool) or not isinstance(each, str | int | float):
                    raise ArgumentError(f"{path}: {name} is {each!r}; write a text, a number, or a list of them")
                arguments.append(f"--{option.replace('_', '-')}={each}")
        return ConfigFile(arguments, users, Path(path).parent)
