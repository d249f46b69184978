"""A file of JSON lines that is only ever added to: each line is on the disk before the next thing happens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from partsong.errors import ArgumentError, OutputError

__all__ = ["LineFile", "read_lines"]


def read_lines(path: Path, noun: str) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file, and how many bytes they take; a last line without its end is left out.

    Args:
        path: the file.
        noun: what it should be, for the error.

    Raises:
        ArgumentError: a line is no object of JSON.
    """
    found, whole = [], 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                said = json.loads(line)
            except ValueError as error:
                raise ArgumentError(f"{path} is no {noun}: line {len(found) + 1}: {error}") from None
            if not isinstance(said, dict):
                raise ArgumentError(f"{path} is no {noun}: line {len(found) + 1} holds no object")
            found.append(said)
            whole += len(line)
    return found, whole


class LineFile:
    """An open file, at its end.

    The first line says what holds for all: a file whose first line is another is refused. A last line that a killed
    program left half written is cut off.

    Args:
        path: made where it is not there, with its folder.
        header: the first line.
        noun: what the file is, for errors.

    Attributes:
        lines: what it held when it was opened, without the header.

    Raises:
        ArgumentError: it is no such file, or its header is another.
        OutputError: it cannot be opened or written.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], noun: str) -> None:
        self.path, self._noun = Path(path), noun
        plain = json.loads(json.dumps(header))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            held, whole = read_lines(self.path, noun) if self.path.is_file() else ([], 0)
            if held and held[0] != plain:
                keys = [key for key in (*plain, *held[0]) if plain.get(key) != held[0].get(key)]
                raise ArgumentError(
                    f"{self.path} has {keys[0]}={held[0].get(keys[0])!r}, this is {plain.get(keys[0])!r}; "
                    f"use another file for this {noun}"
                )
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise OutputError(f"{self.path}: the {noun} cannot be opened: {error}") from error
        self.lines = held[1:]
        if not held:
            self.append(plain)

    def append(self, said: Mapping[str, Any]) -> None:
        """Adds a line; it is on the disk when this returns.

        Raises:
            OutputError: it cannot be written, such as on a full disk.
        """
        line = json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
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
