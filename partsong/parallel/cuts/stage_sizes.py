"""Deals a model's blocks out to the stages of a pipeline."""

from __future__ import annotations

from typing import Annotated, Any

from partsong.errors import ArgumentError
from partsong.parallel.ranks.shards import split_sizes

__all__ = ["Layers", "check_layers", "stage_sizes"]


class _StageSizes:
    """Bounds the numbers of blocks of the stages: a positive integer for each."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, tuple) and all(type(count) is int and count > 0 for count in value)

    def __str__(self) -> str:
        return "the blocks of each stage, such as (14, 14)"


#: Blocks of each stage.
Layers = Annotated[tuple[int, ...], _StageSizes()]


def check_layers(strategy: str, layers: tuple[int, ...] | None, ranks: int | None, knob: str = "degree") -> None:
    """Refuses a number of stages that differs from the number of ranks; None allows any number.

    Raises:
        ArgumentError: names the strategy and both numbers.
    """
    if layers is not None and ranks is not None and len(layers) != ranks:
        raise ArgumentError(f"{strategy}: layers={layers} names {len(layers)} stages, not {knob}={ranks}")


def stage_sizes(model: str, layers: tuple[int, ...] | None, blocks: int, stages: int) -> tuple[int, ...]:
    """Returns how many blocks of a model each stage has.

    Args:
        model: its name, for errors.
        layers: what was asked for; None distributes them evenly.
        blocks: how many it has.
        stages: how many there are.

    Raises:
        ArgumentError: they cannot be shared out like this.
    """
    if layers is None:
        if blocks < stages:
            raise ArgumentError(f"{blocks} blocks of {model} cannot be {stages} stages; use at most {blocks}")
        return split_sizes(blocks, stages)
    if len(layers) != stages or sum(layers) != blocks:
        raise ArgumentError(
            f"layers={layers} are {len(layers)} stages of {sum(layers)} blocks; {model} has "
            f"{blocks} blocks and there are {stages} ranks"
        )
    return layers
