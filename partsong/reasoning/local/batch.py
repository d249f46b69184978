"""The rows that are being written together: forks of prompts, each with a tail of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_tree import Node
from partsong.reasoning.local.shared_attention import Branches, Chunk, Step, branches_of
from partsong.reasoning.local.ticket import Ticket

__all__ = ["Batch", "Row"]


@dataclass(slots=True, eq=False)
class Row:
    """A branch.

    Attributes:
        ticket: whose answer it writes.
        leaf: the end of what it shares with others.
        next_token: fed in the next step.
        mark: thought embedding of what it writes.
        tail: tokens fed so far, whose keys are the row's own.
    """

    ticket: Ticket
    leaf: Node
    next_token: int
    mark: int = 0
    tail: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.leaf.end + len(self.tail)


class Batch:
    """Rows in the order in which their keys lie in memory; a row that leaves gives its place to the last one.

    Args:
        model: computes.
    """

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self.store = AnswerStore((model.layers, model.kv_heads, model.head_dim), model.dtype, model.device)
        self._branches: Branches | None = None

    def join(self, row: Row) -> None:
        """A row comes in; it holds on to its leaf."""
        row.leaf.users += 1
        self.rows.append(row)
        self.changed()

    def leave(self, row: Row) -> None:
        """A row goes; the last one moves into its place."""
        place, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.rows[place] = last
            self.store.move(len(self.rows), place, len(last.tail))
        row.leaf.users -= 1
        self.changed()
        if not self.rows:
            self.store.release()

    def changed(self) -> None:
        """Rows, or the nodes above them, are others than before."""
        self._branches = None

    def forward(self, chunks: Sequence[tuple[Node, int]]) -> tuple[Tensor, list[Tensor | None]]:
        """One token of every row, and the next tokens of prompts.

        Args:
            chunks: (node, tokens to compute), a node behind those it continues.

        Returns:
            Logits `[rows, vocabulary]`, and for each chunk those behind its last token, `[vocabulary]`, where the
            node ends there and somebody asked for them.
        """
        tokens = [row.next_token for row in self.rows]
        positions = [row.position for row in self.rows]
        marks = [row.mark for row in self.rows]
        keep, placed, asked = list(range(len(tokens))), list[Chunk](), list[bool]()
        for node, count in chunks:
            placed.append(Chunk(node, node.done, count, len(tokens)))
            tokens += node.tokens[node.done : node.done + count]
            positions += range(node.start + node.done, node.start + node.done + count)
            marks += [node.mark] * count
            asked.append(node.asked and node.done + count == len(node.tokens))
            if asked[-1]:
                keep.append(len(tokens) - 1)
        lengths = [len(row.tail) for row in self.rows]
        self.store.reserve(len(self.rows), max(lengths, default=0) + 1)
        if self._branches is None:
            self._branches = branches_of([row.leaf for row in self.rows], self.model.device)
        step = Step(self.store, lengths, self._branches, placed)
        logits = self.model.forward(tokens, positions, keep, step, marks)
        for row in self.rows:
            row.tail.append(row.next_token)
        ends = iter(logits[len(self.rows) :])
        return logits[: len(self.rows)], [next(ends).clone() if wanted else None for wanted in asked]

    def keys_of(self, row: Row) -> tuple[Tensor, Tensor]:
        """Keys and values `[layers, kv_heads, tokens, head_dim]` of a row's own tokens, as views."""
        place, length = self.rows.index(row), len(row.tail)
        return self.store.keys[:, place, :, :length], self.store.values[:, place, :, :length]
