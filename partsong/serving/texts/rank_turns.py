"""Lets the ranks that share a model take the steps of several texts in the order of the first rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.ranks.objects import share_object

__all__ = ["RankTurns", "TurnOrder"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """Says what every rank does next; without a number it only shows that the first rank is there.

    Attributes:
        number: of a text.
        begins: what its steps are made of, where it begins.
        leaves: whether it ends before its next step.
        ends: whether the ranks end.
    """

    number: int | None = None
    begins: Any = None
    leaves: bool = False
    ends: bool = False


class RankTurns:
    """Carries the orders of the first rank.

    Args:
        mesh: the ranks; all of them take part.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._axis, self.is_first = mesh.on_host(*AXES), mesh.is_main

    def share(self, order: TurnOrder | None) -> TurnOrder:
        """Returns the first rank's order on every rank; the others give None.

        Raises:
            DistributedError: a rank is gone, or stopped at another point than the others.
        """
        return share_object(self._axis, order, name="the next step of a text")

    def follow(self, begin: Callable[[Any], Generator[Any, None, Any]]) -> None:
        """Takes the first rank's steps on another rank, until that one ends.

        Args:
            begin: makes the steps of a text, as on the first rank.

        Raises:
            DistributedError: as in `share`.
        """
        texts: dict[int, Generator[Any, None, Any]] = {}
        while not (order := self.share(None)).ends:
            if order.number is None:
                continue
            if order.begins is not None:
                texts[order.number] = begin(order.begins)
            if order.leaves:
                texts.pop(order.number).close()
                continue
            try:
                next(texts[order.number])
            except StopIteration:
                del texts[order.number]
            except Exception:  # noqa: BLE001 - as on the first rank, which tells whoever waits
                _LOG.debug("a step failed", exc_info=True)
                del texts[order.number]
