"""Finds what other packages add: strategies, adapters and ways to think, by entry points.

A package names its things in its ``pyproject.toml``::

    [project.entry-points."partsong.strategies"]
    my-strategy = "my_package.my_strategy:MyStrategy"

The groups are ``partsong.strategies``, ``partsong.adapters`` and ``partsong.thinking``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import Any, TypeVar

__all__ = ["plugins"]

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")


def plugins(
    group: str, read: Callable[[Any], Thing], *, name: Callable[[Thing], str], taken: Collection[str]
) -> list[Thing]:
    """Loads what other packages offer in a group of entry points.

    A plug-in that cannot be loaded, is not what the group holds, or bears a name that is taken is left out with one
    warning; the others stay.

    Args:
        group: of the entry points, such as ``partsong.strategies``.
        read: turns what an entry point loads into what the group holds, and raises where it cannot.
        name: of such a thing.
        taken: names that are in use.

    Returns:
        The things, in the order of their entry points' names.
    """
    things: list[Thing] = []
    names = set(taken)
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            thing = read(entry.load())
            if name(thing) in names:
                raise ValueError(f"the name {name(thing)} is taken")
        except Exception as error:  # noqa: BLE001 - whatever a foreign package raises must not harm the others
            package = entry.dist.name if entry.dist is not None else entry.value
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s of %s (%s) is left out; %s", entry.name, package, group, reason)
            continue
        names.add(name(thing))
        things.append(thing)
    return things
