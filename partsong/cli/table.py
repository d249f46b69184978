"""Prints rows as a table."""

from __future__ import annotations

from typing import Any

__all__ = ["table"]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as aligned columns; the last column is not padded."""
    texts = [[str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in texts)
