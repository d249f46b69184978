"""Decides what each worker sees, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

__all__ = ["LAYOUTS", "WorkerLayout", "Table"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """Describes an order of blocks (Hogwild! Inference, Rodionov et al., arXiv 2504.06261, "cache layouts").

    Attributes:
        history: whether a finished step goes to the end of a history that all workers share.
        live: whether workers see what the others are writing, token by token.
    """

    history: bool
    live: bool


#: The layouts by name. With two workers, A sees:
#: contiguous, prompt | others | B | own | A;
#: interleaved, prompt | finished steps of both | own | A's step;
#: combined, prompt | finished steps of both | others | B's step | own | A's step.
LAYOUTS: Mapping[str, WorkerLayout] = MappingProxyType(
    {
        "contiguous": WorkerLayout(history=False, live=True),
        "interleaved": WorkerLayout(history=True, live=False),
        "combined": WorkerLayout(history=True, live=True),
    }
)


@dataclass(kw_only=True, slots=True)
class Table(Generic[T]):
    """Holds all blocks.

    Attributes:
        layout: their order.
        prompt: what comes first.
        others: the heading of the others' unfinished text, shown if there are others to be seen.
        own: the heading of a worker's own text.
        history: finished steps, in the order in which they ended.
        current: the block that each worker writes; None for one that has left and whose last step is finished.

    >>> table = Table(layout=LAYOUTS["combined"], prompt="P", others="o", own="m", history=["H"], current=["A", "B"])
    >>> table.view(0), table.view(1)
    (('P', 'H', 'o', 'B', 'm', 'A'), ('P', 'H', 'o', 'A', 'm', 'B'))
    """

    layout: WorkerLayout
    prompt: T
    others: T
    own: T
    history: list[T] = field(default_factory=list)
    current: list[T | None] = field(default_factory=list)

    def view(self, worker: int) -> tuple[T, ...]:
        """Returns what a worker sees, its own text last. A single worker sees its prompt and its text."""
        mine = self.current[worker]
        assert mine is not None
        if len(self.current) == 1:
            return (self.prompt, *self.history, mine)
        blocks: list[T] = [self.prompt, *self.history]
        if self.layout.live:
            blocks.append(self.others)
            blocks += [each for number, each in enumerate(self.current) if each is not None and number != worker]
        return (*blocks, self.own, mine)

    def finish(self, worker: int, fresh: T | None) -> None:
        """Moves a worker's finished step into the history, and puts another block, or none, in its place."""
        step = self.current[worker]
        assert self.layout.history and step is not None
        self.history.append(step)
        self.current[worker] = fresh
