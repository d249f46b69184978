"""What a row of the tables of real sizes holds, and the tensors of its calls, which have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Attends:
    """Self-attentions that are all alike.

    Attributes:
        layers: how many there are in one call of the model, for each sample.
        tokens: of every stream they mix, in order; each stream is shared out among ranks by itself.
        heads: of the queries.
        dim: of a head.
        kv_heads: of the keys and values; None is as many as queries have.
        itemsize: bytes of a number.
        mask: bytes of a token's mask, where ranks tell each other which tokens are padding.
    """

    layers: int
    tokens: tuple[int, ...]
    heads: int
    dim: int
    kv_heads: int | None = None
    itemsize: int = 2
    mask: int = 0


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """Tokens that every rank sends to every other.

    Attributes:
        tokens: of the whole sample.
        numbers: of one token.
        times: how often it happens in a call.
        itemsize: bytes of a number.
    """

    tokens: int
    numbers: int
    times: int = 1
    itemsize: int = 2


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Layers over rows of a grid that exchange borders or sums, all alike.

    Attributes:
        layers: how many there are in one call.
        up: numbers that go to the rank before.
        down: numbers that go to the rank after.
        all: numbers that go to every other rank.
        itemsize: bytes of a number.
    """

    layers: int
    up: int = 0
    down: int = 0
    all: int = 0
    itemsize: int = 2


@dataclass(frozen=True, kw_only=True)
class RealSize:
    """A published model, and one call of it at the size it was published for.

    Attributes:
        model: name of its class.
        checkpoint: where its configuration comes from.
        config: values that differ from the class' defaults.
        inputs: the arguments of one call for a number of samples.
        attends: its self-attentions.
        gathers: tokens that are put together in a call.
        rows: what else ranks exchange in a call.
        output: shapes of what it returns for a sample.
        grid: rows, or frames, between which its input is cut; None where tokens are cut.
        step: rows of the grid that stay together. There can be no more ranks than such runs.
        batches: whether a call may have several samples.
        values: what in its forward takes more than shapes; None where shapes are enough.
    """

    model: str
    checkpoint: str
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[int], dict[str, Any]]
    attends: tuple[Attends, ...] = ()
    gathers: tuple[Gathers, ...] = ()
    rows: tuple[Rows, ...] = ()
    output: tuple[tuple[int, ...], ...]
    grid: int | None = None
    step: int = 1
    batches: bool = True
    values: str | None = None

    def build(self) -> nn.Module:
        """The model without memory for its weights, in half precision."""
        kind = getattr(diffusers, self.model)
        with torch.device("meta"):
            return kind(**self.config).to(torch.bfloat16).eval()


def real(*shape: int) -> Tensor:
    """Numbers in half precision."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def full(*shape: int) -> Tensor:
    """Numbers in single precision, as times and angles are."""
    return torch.empty(shape, device="meta")


def whole(*shape: int) -> Tensor:
    """Whole numbers."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def flags(*shape: int) -> Tensor:
    """A mask."""
    return torch.empty(shape, dtype=torch.bool, device="meta")


def present(*shape: int) -> Tensor:
    """A mask with values, for models that read lengths out of it: nothing is padding."""
    return torch.ones(shape, dtype=torch.bool)


def angles(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a rotary embedding."""
    return full(tokens, dim), full(tokens, dim)
