"""Reads rows of files with a JSON object per line."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from partsong.errors import ArgumentError
from partsong.knobs import Count, Whole, check_knobs, type_hints
from partsong.whole_text import whole_json

__all__ = ["lines_of", "select"]


def lines_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """Reads the objects of a file, packed with gzip if its name ends in ``.gz``; blank lines are passed over.

    Raises:
        ArgumentError: a line is no JSON object.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = whole_json(json.loads(line))
            except json.JSONDecodeError as error:
                raise ArgumentError(f"{path}: line {number + 1} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise ArgumentError(f"{path}: line {number + 1} holds no object but {type(row).__name__}")
            yield row


def select(
    rows: Iterator[Mapping[str, Any]], num: Count | None, first: Annotated[int, Whole(0)], where: str
) -> list[tuple[int, Mapping[str, Any]]]:
    """Returns the rows from `first` to `first + num`, with their numbers."""
    check_knobs(type_hints(select), {"num": num, "first": first})
    numbered = list(itertools.islice(enumerate(rows), first, None if num is None else first + num))
    if len(numbered) < (num or 1):
        raise ArgumentError(f"{where} has {len(numbered)} problems from number {first} on, asked for {num or 'some'}")
    return numbered
