"""Decides which keys and values are reused, and which tokens are recomputed in a step.

Models whose tokens see nothing after them (causal) or after their block (block diffusion) lose nothing by keeping the
keys of finished blocks: there every policy but `NoCache` keeps them, and `PrefixCache` is exact. Where all tokens see
each other (LLaDA, Dream), every kept key is at least a step old, and the policies below differ in what they keep. All
of them equal `NoCache` at ``refresh_every=1``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from partsong.knobs import Count, Whole, check_fields
from partsong.samplers.text.canvas import Canvas, Work

__all__ = ["DelayedCache", "DualCache", "NoCache", "PrefixCache", "TextCache", "VicinityCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCache(ABC):
    """Decides what is computed between two refreshes.

    Attributes:
        refresh_every: steps from one forward of everything to the next; 1 computes all keys in every step, as
            without a cache; None refreshes only where the policy says so.
        refresh_blocks: whether everything is recomputed when a block begins.
    """

    refresh_every: Count | None = None
    refresh_blocks: bool = True

    def validate(self) -> None:
        """Refuses knobs out of range with an ArgumentError that names the knob."""
        check_fields(self)

    @abstractmethod
    def fresh(self, canvas: Canvas, work: Work, step: int) -> Tensor:
        """Returns which of the visible positions a step between two refreshes computes: bool `[B, L]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCache(TextCache):
    """Keeps no keys and computes everything in every step.

    >>> NoCache().validate()
    """

    def fresh(self, canvas: Canvas, work: Work, step: int) -> Tensor:
        """Returns all positions of the texts."""
        return canvas.inside


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCache(TextCache):
    """Keeps the keys of everything before the first active block.

    Source: Fast-dLLM, arXiv 2505.22618.

    >>> PrefixCache(refresh_every=8).refresh_every
    8
    """

    def fresh(self, canvas: Canvas, work: Work, step: int) -> Tensor:
        """Returns all positions from the first active block on; where tokens see only their group, all of it."""
        start = canvas.block >= work.front[:, None]
        if canvas.layered:
            start = start | (canvas.group >= work.low[:, None])
        return start & canvas.inside


@dataclass(frozen=True, kw_only=True, slots=True)
class DualCache(TextCache):
    """Keeps the keys of everything but the active blocks, so also of the masks after them.

    Source: Fast-dLLM, arXiv 2505.22618.

    >>> DualCache().refresh_blocks
    True
    """

    def fresh(self, canvas: Canvas, work: Work, step: int) -> Tensor:
        """Returns the active blocks."""
        return work.places


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedCache(TextCache):
    """Keeps the keys of decided tokens, beginning some steps after their decision, and computes all undecided ones.

    Attributes:
        delay: steps for which a token is still computed after its decision: its keys change most at first.

    Source: dKV-Cache, arXiv 2505.15781.

    >>> DelayedCache().refresh_every
    8
    """

    refresh_every: Count | None = 8
    refresh_blocks: bool = False
    delay: Annotated[int, Whole(why="the keys of a token that was just decided are not known yet")] = 1

    def fresh(self, canvas: Canvas, work: Work, step: int) -> Tensor:
        """Returns the undecided and the just decided positions."""
        recent = canvas.free & (canvas.decided_at >= step - self.delay)
        return (canvas.undecided | recent) & canvas.inside


@dataclass(frozen=True, kw_only=True, slots=True)
class VicinityCache(TextCache):
    """Keeps the keys of everything but the active blocks and their neighbourhood.

    Attributes:
        radius: positions on either side of the active blocks that are computed as well.

    Source: dInfer's vicinity refresh, arXiv 2510.08666.

    >>> VicinityCache().radius
    16
    """

    radius: Annotated[int, Whole(0)] = 16

    def fresh(self, canvas: Canvas, work: Work, step: int) -> Tensor:
        """Returns the active blocks and what lies near them."""
        places = torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device)
        first = torch.where(work.places, places, places.numel()).amin(1, keepdim=True) - self.radius
        last = torch.where(work.places, places, -1).amax(1, keepdim=True) + self.radius
        return (places >= first) & (places <= last) & canvas.inside
