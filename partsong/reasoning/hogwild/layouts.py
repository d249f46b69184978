"""What each worker sees, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

__all__ = ["LAYOUTS", "WorkerLayout", "Table"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """An order of blocks (Hogwild! Inference, Rodionov et al., arXiv 2504.06261, "cache layouts").

    Attributes:
        history: a step that is finished goes to the end of a history that all workers have in common.
        live: workers see what the others are writing, token by token.
    """

    history: bool
    live: bool


#: By name. With two workers, A sees:
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
    """The blocks there are.

    Attributes:
        layout: their order.
        prompt: what stands before everything.
        others: heading of the others' unfinished text; it stands where there are others to be seen.
        own: heading of a worker's own.
        history: finished steps, in the order in which they were.
        current: by worker, what it writes; None for one that has left and whose last step is finished.

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
        """What a worker sees, its own text last. A worker that is alone sees its prompt and its text."""
        mine = self.current[worker]
        assert mine is not None
        if len(self.current) == 1:
            return (self.prompt, *self.history, mine)
        found: list[T] = [self.prompt, *self.history]
        if self.layout.live:
            found.append(self.others)
            found += [each for number, each in enumerate(self.current) if each is not None and number != worker]
        return (*found, self.own, mine)

    def finish(self, worker: int, fresh: T | None) -> None:
        """A worker's step is finished: it goes into the history and gives its place to another block, or to none."""
        step = self.current[worker]
        assert self.layout.history and step is not None
        self.history.append(step)
        self.current[worker] = fresh
