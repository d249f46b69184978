"""Tells who copies over the same bus when exchanges between ranks begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["BusTraffic", "Exchange"]


class Exchange(Protocol):
    """Describes messages that are under way."""

    @property
    def done(self) -> bool:
        """Says whether they have all come."""
        ...

    def then(self, finish: Callable[[], Any]) -> None:
        """Calls a function once this rank has waited for them."""
        ...

    def precede(self, stream: torch.Stream) -> None:
        """Lets a stream wait for them, and not the host."""
        ...


Noted = TypeVar("Noted", bound=Exchange)

#: Takes messages that were just posted, and whether a device carries them out, so that a stream can wait for them.
Watcher = Callable[[Exchange, bool], None]


class BusTraffic:
    """Keeps the functions that are called for each exchange of a mesh; with none of them nothing is done."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Calls a function for each exchange from now on; returns what ends this."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def note(self, exchange: Noted, *, on_device: bool) -> Noted:
        """Tells all of them of an exchange that was posted, and returns it."""
        for watcher in self._watchers:
            watcher(exchange, on_device)
        return exchange
