"""Keeps a file of JSON lines that only grows; every line is on the disk before the program continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from partsong.errors import ArgumentError, OutputError
from partsong.whole_text import whole_json

__all__ = ["LineFile", "read_lines"]


def read_lines(path: Path, noun: str) -> tuple[list[dict[str, Any]], int]:
    """Returns the complete lines of a file and how many bytes they take; an incomplete last line is left out.

    Args:
        path: the file.
        noun: what the file should be, for the error.

    Raises:
        ArgumentError: a line is not a JSON object.
    """
    objects, size = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                value = whole_json(json.loads(line))
            except ValueError as error:
                raise ArgumentError(f"{path} is no {noun}: line {len(objects) + 1}: {error}") from None
            if not isinstance(value, dict):
                raise ArgumentError(f"{path} is no {noun}: line {len(objects) + 1} holds no object")
            objects.append(value)
            size += len(line)
    return objects, size


class LineFile:
    """Holds an open file and adds lines at its end.

    The first line, the header, says what all lines have in common; a file with another header is refused. An incomplete
    last line, left by a program that was killed, is cut off.

    Args:
        path: the file; it is made, with its folder, if it is not there.
        header: the first line.
        noun: what the file is, for errors.

    Attributes:
        lines: the lines it held when it was opened, without the header.

    Raises:
        ArgumentError: the file holds something else, or has another header.
        OutputError: the file cannot be opened or written.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], noun: str) -> None:
        self.path, self._noun = Path(path), noun
        plain = json.loads(json.dumps(header))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines, size = read_lines(self.path, noun) if self.path.is_file() else ([], 0)
            if lines and lines[0] != plain:
                key = next(key for key in (*plain, *lines[0]) if plain.get(key) != lines[0].get(key))
                raise ArgumentError(
                    f"{self.path} has {key}={lines[0].get(key)!r}, this is {plain.get(key)!r}; "
                    f"use another file for this {noun}"
                )
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.ftruncate(self._file, size)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise OutputError(f"{self.path}: the {noun} cannot be opened: {error}") from error
        self.lines = lines[1:]
        if not lines:
            self.append(plain)

    def append(self, value: Mapping[str, Any]) -> None:
        """Adds a line; it is on the disk when this returns.

        Raises:
            OutputError: the line cannot be written, such as on a full disk.
        """
        line = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise OutputError(
                f"{self.path}: the {self._noun} cannot be written: {error}; make room, run again"
            ) from error

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def __enter__(self) -> LineFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
