"""Defines the base of strategies that share out language models only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.protocols import Coder
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy

__all__ = ["TextOnly"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOnly(Strategy):
    """Shares out a language model; whatever else it is given is refused, on one rank as well."""

    denoises: ClassVar[bool] = False
    #: What it does with language models, and what to use for others.
    instead: ClassVar[str]

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses denoisers."""
        return self.instead

    def codes(self, target: Any, mesh: Mesh) -> Coder | None:
        """Refuses whatever else there is.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"{type(self).__name__} on {type(target).__name__}: {self.instead}")
