"""Takes out all but three of a run of equal blocks, so that a deep model is traced as quickly as a shallow one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

__all__ = ["KEPT", "EqualBlocks", "runs_of", "shallow"]

#: The first and the last block of a run have neighbours of another kind; the one between stands for all others.
KEPT = 3


@dataclass(frozen=True, slots=True)
class EqualBlocks:
    """Describes equal blocks that follow each other in a list of a model.

    Attributes:
        blocks: the list.
        start: where the run begins.
        length: how many blocks it has.
    """

    blocks: nn.ModuleList
    start: int
    length: int

    @property
    def between(self) -> int:
        """Returns how many blocks the one in the middle stands for."""
        return max(1, self.length - KEPT + 1)


def runs_of(module: nn.Module) -> list[EqualBlocks]:
    """Finds the runs of at least three equal blocks in a model, outermost lists only."""
    runs: list[EqualBlocks] = []
    for child in module.children():
        lists = isinstance(child, nn.ModuleList)
        inside = list(_runs_in(child)) if lists else []
        runs += inside or runs_of(child)
    return runs


def _runs_in(blocks: nn.ModuleList) -> Iterator[EqualBlocks]:
    kinds = [_kind(block) for block in blocks]
    start = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[start]:
            if place - start >= KEPT:
                yield EqualBlocks(blocks, start, place - start)
            start = place


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Returns what equal blocks have in common: classes and shapes of all they hold."""
    parts = tuple(type(part) for part in block.modules())
    return (*parts, *((name, tuple(weight.shape)) for name, weight in block.named_parameters()))


@contextmanager
def shallow(runs: Sequence[EqualBlocks]) -> Iterator[None]:
    """Leaves three blocks of each run in place inside the block, and then puts the others back."""
    saved = {id(run.blocks): (run.blocks, list(run.blocks)) for run in runs}
    try:
        for blocks, whole in saved.values():
            mine = [run for run in runs if run.blocks is blocks]
            left_out = {place for run in mine for place in range(run.start + 2, run.start + run.length - 1)}
            _fill(blocks, [block for place, block in enumerate(whole) if place not in left_out])
        yield
    finally:
        for blocks, whole in saved.values():
            _fill(blocks, whole)


def _fill(blocks: nn.ModuleList, modules: list[nn.Module]) -> None:
    while len(blocks):
        del blocks[-1]
    blocks.extend(modules)
