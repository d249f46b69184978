"""Holds the rules by which the tokens of pictures are decided, as data, and finds them by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError
from partsong.knobs import Count, Knobs, Number, by_name, parse_knobs
from partsong.samplers.any_order.groups import decode_groups
from partsong.samplers.any_order.jacobi import decode_jacobi
from partsong.samplers.any_order.model import PictureModel
from partsong.samplers.any_order.orders import apart_order, group_sizes, random_order, raster_order
from partsong.samplers.text.any_order import AnyOrderText, decode_any_order

__all__ = ["ASSD", "LPD", "PICTURE_RULES", "KeyedJacobi", "PictureRule", "orders_of", "parse_picture_rule"]

#: How the places of a picture may be ordered.
Order = Literal["apart", "random", "raster"]
Temperature = Annotated[float, Number(0.0)]


class PictureRule(Protocol):
    """Decides the tokens of pictures.

    Attributes:
        kind: class of the rule: whether the pictures equal those of its serial twin.
    """

    kind: ClassVar[Literal["exact", "approximate"]]

    def decode(self, model: PictureModel, seed: int = 0) -> AnyOrderText:
        """Decides the tokens of a model's pictures, int64 `[B, grid * grid]`, and counts what that cost."""
        ...

    def serial(self) -> PictureRule:
        """Returns the rule with one token a forward, in the same order."""
        ...

    def validate(self) -> None:
        """Checks the knobs.

        Raises:
            ArgumentError: one is out of its bounds.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LPD(Knobs):
    """Decides tokens in groups that grow, whose members lie apart and see each other's questions.

    Approximate: with as many steps as tokens it is one token a forward.

    Attributes:
        steps: forwards; None takes one for each token.
        order: "apart" as in the paper; "random" and "raster" are for comparison.
        mutual: whether the questions of a group see each other; False is for comparison.
        temperature: of the draws; 0 takes the likeliest tokens.

    Source: locality-aware parallel decoding, arXiv 2507.01957.
    """

    kind: ClassVar[Literal["exact", "approximate"]] = "approximate"

    steps: Count | None = 12
    order: Order = "apart"
    mutual: bool = True
    temperature: Temperature = 1.0

    def decode(self, model: PictureModel, seed: int = 0) -> AnyOrderText:
        """Decides the tokens of a model's pictures.

        Raises:
            ArgumentError: there are more steps than tokens.
        """
        sizes = group_sizes(model.grid**2, self.steps or model.grid**2)
        order = orders_of(model, self.order, sizes, seed)
        tokens = decode_groups(model, order, sizes, mutual=self.mutual, temperature=self.temperature, seed=seed)
        nothing = torch.zeros_like(tokens[:, 0])
        return AnyOrderText(tokens=tokens, forwards=nothing + len(sizes), drafted=nothing, rejected=nothing)

    def serial(self) -> LPD:
        """Returns the rule with one token a forward, in the order that is made for that."""
        return replace(self, steps=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ASSD(Knobs):
    """Guesses the next tokens independently with one forward, and checks them with another.

    Exact: the tokens are those of one token a forward.

    Attributes:
        drafts: how many tokens to guess.
        order: of the places.
        temperature: of the draws; 0 takes the likeliest tokens.

    Source: any-subset speculative decoding, arXiv 2504.20456.
    """

    kind: ClassVar[Literal["exact", "approximate"]] = "exact"

    drafts: Count = 8
    order: Order = "apart"
    temperature: Temperature = 1.0

    def decode(self, model: PictureModel, seed: int = 0) -> AnyOrderText:
        """Decides the tokens of a model's pictures."""
        order = orders_of(model, self.order, [1] * model.grid**2, seed)
        knobs = {"drafts": self.drafts, "temperature": self.temperature}
        return decode_any_order(model, torch.zeros_like(order), order, **knobs, seed=seed)

    def serial(self) -> LPD:
        """Returns the rule with one token a forward."""
        return LPD(steps=None, order=self.order, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedJacobi(Knobs):
    """Evaluates a window of tokens until their answers no longer change, with constant noise.

    Exact: the tokens are those of one token a forward.

    Attributes:
        window: how many tokens to ask for at once.
        order: of the places.
        temperature: of the draws; 0 takes the likeliest tokens.

    Source: Jacobi decoding, arXiv 2002.03629; of pictures, arXiv 2410.01699.
    """

    kind: ClassVar[Literal["exact", "approximate"]] = "exact"

    window: Count = 16
    order: Order = "raster"
    temperature: Temperature = 1.0

    def decode(self, model: PictureModel, seed: int = 0) -> AnyOrderText:
        """Decides the tokens of a model's pictures."""
        order = orders_of(model, self.order, [1] * model.grid**2, seed)
        return decode_jacobi(model, order, window=self.window, temperature=self.temperature, seed=seed)

    def serial(self) -> LPD:
        """Returns the rule with one token a forward."""
        return LPD(steps=None, order=self.order, temperature=self.temperature)


def orders_of(model: PictureModel, order: Order, sizes: list[int], seed: int) -> Tensor:
    """Orders the places of each picture, int64 `[B, grid * grid]`; picture i has an order of its own.

    Args:
        model: says how many pictures there are, and how large.
        order: kind of order.
        sizes: sizes of the groups.
        seed: of orders that are drawn.

    Raises:
        ArgumentError: there is no such order.
    """
    own = [seeds.derive(seed, "picture", row) for row in range(model.batch)]
    match order:
        case "apart":
            rows = [apart_order(model.grid, sizes, key) for key in own]
        case "random":
            rows = [random_order(model.grid, key) for key in own]
        case "raster":
            rows = [raster_order(model.grid) for _ in own]
        case _:
            raise ArgumentError(f"no order {order!r}; use apart, random or raster")
    return torch.from_numpy(np.stack(rows))


#: Rules by name: ``lpd``, ``assd``, ``keyed-jacobi``.
PICTURE_RULES = by_name((LPD, ASSD, KeyedJacobi))


def parse_picture_rule(text: str) -> PictureRule:
    """Reads a rule from ``NAME[:key=value,...]``.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.

    >>> parse_picture_rule("lpd:steps=8,order=raster")
    LPD(steps=8, order='raster', mutual=True, temperature=1.0)
    """
    return parse_knobs(text, PICTURE_RULES, "rule for pictures")
