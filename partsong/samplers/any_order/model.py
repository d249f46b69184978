"""Defines what the samplers need from a model of picture tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from partsong.samplers.text.any_order import AnyOrderModel

__all__ = ["GroupReader", "PictureModel"]


class GroupReader(Protocol):
    """Reads pictures group after group, and keeps what it has read."""

    def ask(self, tokens: Tensor, places: Tensor, asked: Tensor, *, mutual: bool) -> Tensor:
        """Reads the tokens of the last group and returns logits `[B, Q, V]` of the next one, with one forward.

        Args:
            tokens: int64 `[B, K]`, the tokens that have been decided since the last call. They see each other.
            places: int64 `[B, K]`, where they are.
            asked: int64 `[B, Q]`, the places that are asked for.
            mutual: whether the questions see each other.
        """
        ...


class PictureModel(AnyOrderModel, Protocol):
    """Gives logits of the tokens of pictures with captions.

    When called, it answers as an `AnyOrderModel`.

    Attributes:
        grid: tokens along a side.
        batch: how many pictures.
    """

    @property
    def grid(self) -> int:
        """Returns how many tokens a side has."""
        ...

    @property
    def batch(self) -> int:
        """Returns how many pictures there are."""
        ...

    def reader(self) -> GroupReader:
        """Returns a reader that has seen only the captions."""
        ...
