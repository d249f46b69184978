"""The rows that are being written together: forks of prompts, each with a tail of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_tree import PrefixNode
from partsong.reasoning.local.shared_attention import AttentionStep, Branches, Chunk, branches_of
from partsong.reasoning.local.ticket import Ticket

__all__ = ["Batch", "BatchRow"]


#: Nodes of at most so many tokens are copied by every row that reads them: a product with few keys costs more than
#: keeping these again does.
_SHORT = 16
#: Likewise where nobody else reads them, such as the threads that a text has joined.
_SHORT_ALONE = 128


@dataclass(slots=True, eq=False)
class BatchRow:
    """A branch.

    Attributes:
        ticket: whose answer it writes.
        leaf: the end of what it shares with others.
        next_token: fed in the next step.
        mark: thought embedding of what it writes.
        tail: tokens fed so far, whose keys are the row's own.
        own: nodes of its chain whose keys it has copied; they stand before those of the tail.
        copied: tokens of these.
    """

    ticket: Ticket
    leaf: PrefixNode
    next_token: int
    mark: int = 0
    tail: list[int] = field(default_factory=list)
    own: set[PrefixNode] = field(default_factory=set)
    copied: int = 0

    @property
    def shared(self) -> list[PrefixNode]:
        """The nodes it reads where they are."""
        return [node for node in self.leaf.chain() if node not in self.own]

    @property
    def length(self) -> int:
        """Keys of its own."""
        return self.copied + len(self.tail)

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
        self.rows: list[BatchRow] = []
        self.store = AnswerStore((model.layers, model.kv_heads, model.head_dim), model.dtype, model.device)
        self._branches: Branches | None = None

    def join(self, row: BatchRow) -> None:
        """A row comes in; it holds on to its leaf."""
        row.leaf.users += 1
        self.rows.append(row)
        self._settle(row)
        self.changed()

    def _settle(self, row: BatchRow) -> None:
        """Copies the short nodes of a row's chain. In which order keys stand makes no difference."""
        short = [node for node in row.leaf.chain() if _is_short(node)]
        self.store.reserve(len(self.rows), sum(len(node.tokens) for node in short) + 1)
        for node in short:
            assert node.keys is not None and node.values is not None
            self.store.write(len(self.rows) - 1, row.copied, node.keys, node.values)
            row.own.add(node)
            row.copied += len(node.tokens)

    def note_cut(self, first: PrefixNode, second: PrefixNode) -> None:
        """A node was cut; the second part is the node it was."""
        for row in self.rows:
            if second in row.own:
                row.own.add(first)
        self.changed()

    def leave(self, row: BatchRow) -> None:
        """A row goes; the last one moves into its place."""
        place, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.rows[place] = last
            self.store.move(len(self.rows), place, last.length)
        row.leaf.users -= 1
        self.changed()
        if not self.rows:
            self.store.release()

    def changed(self) -> None:
        """Rows, or the nodes above them, are others than before."""
        self._branches = None

    def forward(self, chunks: Sequence[tuple[PrefixNode, int]]) -> tuple[Tensor, list[Tensor | None]]:
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
        lengths = [row.length for row in self.rows]
        self.store.reserve(len(self.rows), max(lengths, default=0) + 1)
        if self._branches is None:
            self._branches = branches_of([row.shared for row in self.rows], self.model.device)
        step = AttentionStep(self.store, lengths, self._branches, placed)
        logits = self.model.forward(tokens, positions, keep, step, marks)
        for row in self.rows:
            row.tail.append(row.next_token)
        ends = iter(logits[len(self.rows) :])
        return logits[: len(self.rows)], [next(ends).clone() if wanted else None for wanted in asked]

    def keys_of(self, row: BatchRow) -> tuple[Tensor, Tensor]:
        """Keys and values `[layers, kv_heads, tokens, head_dim]` of a row's own tokens, as views."""
        place, own = self.rows.index(row), slice(row.copied, row.length)
        return self.store.keys[:, place, :, own], self.store.values[:, place, :, own]


def _is_short(node: PrefixNode) -> bool:
    alone = node.users <= 1 and len(node.children) <= 1
    return len(node.tokens) <= (_SHORT_ALONE if alone else _SHORT)
