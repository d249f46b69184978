"""Finds what other packages add by entry points: strategies, adapters, thinking methods and small models.

A package names what it adds in its ``pyproject.toml``::

    [project.entry-points."partsong.strategies"]
    my-strategy = "my_package.my_strategy:MyStrategy"

The groups are ``partsong.strategies``, ``partsong.adapters``, ``partsong.thinking`` and ``partsong.models``. An entry
may also name a tuple of things.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

__all__ = ["Registry"]

logger = logging.getLogger(__name__)

Row = TypeVar("Row")


class Registry(Mapping[str, Row]):
    """Maps names to what this package has and, from the first access on, to what other packages add.

    A plug-in that cannot be loaded, is of another kind than its group, or has a name that is taken is left out with one
    warning; the others stay. Nothing of another package is imported before the first access.

    Args:
        group: group of entry points, such as ``partsong.strategies``.
        built_in: the rows of this package, in order.
        name: returns the name of a row.
        read: turns what an entry point loads into a row, and raises where it cannot.

    Example:
        >>> registry = Registry("partsong.none", [int, str], name=lambda kind: kind.__name__, read=lambda thing: thing)
        >>> list(registry), registry["int"]
        (['int', 'str'], <class 'int'>)
    """

    def __init__(
        self, group: str, built_in: Iterable[Row], *, name: Callable[[Row], str], read: Callable[[Any], Row]
    ) -> None:
        self._group, self._name, self._read = group, name, read
        self._built_in = {name(row): row for row in built_in}

    def __getitem__(self, name: str) -> Row:
        # A plug-in may look up its base class here while it is being loaded.
        return self._built_in[name] if name in self._built_in else self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def _rows(self) -> dict[str, Row]:
        rows = dict(self._built_in)
        for entry in sorted(entry_points(group=self._group), key=lambda entry: entry.name):
            try:
                self._add(rows, entry)
            except Exception as error:  # noqa: BLE001 - whatever a foreign package raises must not harm the others
                package = entry.value if entry.dist is None else entry.dist.name
                reason = f"{type(error).__name__}: {error}"
                logger.warning("%s of %s (%s) is left out; %s", entry.name, package, self._group, reason)
        return rows

    def _add(self, rows: dict[str, Row], entry: EntryPoint) -> None:
        loaded = entry.load()
        for row in map(self._read, loaded if isinstance(loaded, tuple) else (loaded,)):
            if self._name(row) in rows:
                raise ValueError(f"the name {self._name(row)} is taken")
            rows[self._name(row)] = row
