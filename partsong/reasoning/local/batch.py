"""Holds the rows that are being written together: forks of prompts, each with a tail of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from partsong.kernels.speculation.draft import DraftTree
from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_tree import PrefixNode
from partsong.reasoning.local.shared_attention import AttentionStep, Branches, Chunk, branches_of

__all__ = ["Batch", "BatchRow"]


#: Every row copies the nodes it reads that have at most this many tokens. A product with few keys costs more than
#: keeping these keys twice.
_SHORT = 16
#: The same limit for nodes that no other row reads, such as threads that a text has joined.
_SHORT_ALONE = 128


@dataclass(slots=True, eq=False)
class BatchRow:
    """Describes a branch.

    Attributes:
        leaf: the last node that it shares with others.
        next_token: the token fed in the next step.
        mark: the thought embedding of what it writes.
        tail: tokens fed so far, whose keys are the row's own.
        own: nodes of its chain whose keys it has copied. These keys stand before those of the tail.
        copied: how many tokens these nodes have.
    """

    leaf: PrefixNode
    next_token: int
    mark: int = 0
    tail: list[int] = field(default_factory=list)
    own: set[PrefixNode] = field(default_factory=set)
    copied: int = 0

    @property
    def shared(self) -> list[PrefixNode]:
        """Returns the nodes whose keys it reads in place."""
        return [node for node in self.leaf.chain() if node not in self.own]

    @property
    def length(self) -> int:
        """Counts the keys of its own."""
        return self.copied + len(self.tail)

    @property
    def position(self) -> int:
        """Returns the position of the next token."""
        return self.leaf.end + len(self.tail)


Row = TypeVar("Row", bound=BatchRow)


class Batch(Generic[Row]):
    """Holds rows in the order in which their keys lie in memory; the last row takes the place of one that leaves.

    Args:
        model: the model that computes.
    """

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self.store = AnswerStore((model.layers, model.kv_heads, model.head_dim), model.dtype, model.device)
        self._branches: Branches | None = None

    def join(self, row: Row) -> None:
        """Takes a row in, which then uses its leaf."""
        row.leaf.users += 1
        self.rows.append(row)
        self._settle(row)
        self.changed()

    def _settle(self, row: Row) -> None:
        """Copies the short nodes of a row's chain. The order of keys makes no difference."""
        short = [node for node in row.leaf.chain() if _is_short(node)]
        self.store.reserve(len(self.rows), sum(len(node.tokens) for node in short) + 1)
        for node in short:
            assert node.keys is not None and node.values is not None
            self.store.write(len(self.rows) - 1, row.copied, node.keys, node.values)
            row.own.add(node)
            row.copied += len(node.tokens)

    def note_cut(self, first: PrefixNode, second: PrefixNode) -> None:
        """Takes note that a node was cut in two; the second part is the node that was there before."""
        for row in self.rows:
            if second in row.own:
                row.own.add(first)
        self.changed()

    def leave(self, row: Row) -> None:
        """Lets a row go and moves the last one into its place."""
        place, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.rows[place] = last
            self.store.move(len(self.rows), place, last.length)
        row.leaf.users -= 1
        self.changed()
        if not self.rows:
            self.store.release()

    def changed(self) -> None:
        """Takes note that the rows, or the nodes above them, are not the same as before."""
        self._branches = None

    def forward(
        self, chunks: Sequence[tuple[PrefixNode, int]], drafts: Sequence[DraftTree] = ()
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Computes the next token of every row with the guesses at those after it, and the next tokens of prompts.

        Args:
            chunks: (node, how many tokens to compute); a node comes after those it continues.
            drafts: the guesses of each row; empty if there are none at all.

        Returns:
            Logits `[tokens, vocabulary]` after each row's token and after its guesses, row by row, and for each chunk
            the logits `[vocabulary]` after its last token, if the node ends there and a call needs them.
        """
        tokens, positions, marks = self._written(drafts)
        written = len(tokens)
        keep, placed, has_logits = list(range(len(tokens))), list[Chunk](), list[bool]()
        for node, count in chunks:
            placed.append(Chunk(node, node.done, count, len(tokens)))
            tokens += node.tokens[node.done : node.done + count]
            positions += range(node.start + node.done, node.start + node.done + count)
            marks += [node.mark] * count
            has_logits.append(node.needs_logits and node.done + count == len(node.tokens))
            if has_logits[-1]:
                keep.append(len(tokens) - 1)
        lengths = [row.length for row in self.rows]
        self.store.reserve(len(self.rows), max(lengths, default=0) + 1 + max(map(len, drafts), default=0))
        if self._branches is None:
            self._branches = branches_of([row.shared for row in self.rows], self.model.device)
        step = AttentionStep(self.store, lengths, self._branches, placed, [draft.parents for draft in drafts])
        logits = self.model.forward(tokens, positions, keep, step, marks)
        ends = iter(logits[written:])
        return logits[:written], [next(ends).clone() if each else None for each in has_logits]

    def _written(self, drafts: Sequence[DraftTree]) -> tuple[list[int], list[int], list[int]]:
        """Lists tokens, positions and marks of what the rows feed in a step."""
        if not any(map(len, drafts)):
            rows = self.rows
            return [row.next_token for row in rows], [row.position for row in rows], [row.mark for row in rows]
        tokens, positions, marks = list[int](), list[int](), list[int]()
        for row, draft in zip(self.rows, drafts, strict=True):
            tokens += (row.next_token, *draft.tokens)
            positions += [row.position + depth for depth in draft.depths]
            marks += [row.mark] * len(draft.depths)
        return tokens, positions, marks

    def advance(self, row: Row, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Makes the tokens that were fed and kept part of a row.

        Args:
            row: the row.
            path: the nodes of its draft that are kept, node 0 first.
            tokens: what was drawn after each of them; the last is fed next.
        """
        if path[-1] >= len(path):  # other nodes lie between them
            self.store.gather(self.rows.index(row), row.length, path)
        row.tail += (row.next_token, *tokens[:-1])
        row.next_token = tokens[-1]

    def keys_of(self, row: Row) -> tuple[Tensor, Tensor]:
        """Returns keys and values `[layers, kv_heads, tokens, head_dim]` of a row's own tokens, as views."""
        place, own = self.rows.index(row), slice(row.copied, row.length)
        return self.store.keys[:, place, :, own], self.store.values[:, place, :, own]


def _is_short(node: PrefixNode) -> bool:
    alone = node.users <= 1 and len(node.children) <= 1
    return len(node.tokens) <= (_SHORT_ALONE if alone else _SHORT)
