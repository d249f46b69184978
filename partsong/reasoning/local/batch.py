"""Computes the rows that are being written together: forks of prompts, each with a tail of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from partsong.kernels.speculation.draft import DraftTree
from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.batch_feed import BatchFeed, BatchRow
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_node import PrefixNode
from partsong.reasoning.local.shared_attention import AttentionStep, Branches, Chunk, branches_of

__all__ = ["Batch", "BatchOutput"]


#: Nodes with at most this many tokens are copied into every row that reads them: a product with few keys costs more
#: than keeping these keys twice.
_SHORT = 16
#: The same limit for nodes that no other row reads, such as threads that a text has joined.
_SHORT_ALONE = 128


Row = TypeVar("Row", bound=BatchRow)


class BatchOutput(NamedTuple):
    """Holds the output of a forward.

    Attributes:
        logits: those after each row's token and after its guesses, `[tokens, vocabulary]`, row by row.
        ends: for each chunk the logits `[vocabulary]` after its last token, if its node ends there and a call asks.
        states: for each row those of its token, its guesses and its masks, `[rows fed, layers, hidden size]`; empty if
            not requested.
        ahead: for each chunk those of its last token and the masks after it, likewise.
        read: for each chunk those of its tokens, likewise.
    """

    logits: Tensor
    ends: list[Tensor | None]
    states: list[Tensor]
    ahead: list[Tensor]
    read: list[Tensor]


class Batch(Generic[Row]):
    """Holds rows in the order in which their keys lie in memory; the last row takes the place of one that leaves.

    Args:
        model: the model that computes.
    """

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self.store = AnswerStore(model.key_shape, model.dtype, model.device)
        self._branches: dict[tuple[int, int], Branches] = {}

    def join(self, row: Row) -> None:
        """Adds a row, which then uses its leaf."""
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
        """Notes that a node was cut in two; the second part is the original node."""
        for row in self.rows:
            if second in row.own:
                row.own.add(first)
        self.changed()

    def leave(self, row: Row) -> None:
        """Removes a row and moves the last one into its place."""
        place, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.rows[place] = last
            self.store.move(len(self.rows), place, last.length)
        row.leaf.users -= 1
        self.changed()
        if not self.rows:
            self.store.release()

    def changed(self) -> None:
        """Notes that the rows, or the nodes above them, have changed."""
        self._branches.clear()

    def forward(
        self,
        chunks: Sequence[tuple[PrefixNode, int]],
        drafts: Sequence[DraftTree] = (),
        *,
        layers: tuple[int, ...] = (),
        masks: int = 0,
    ) -> BatchOutput:
        """Computes the next token of every row with the guesses at those after it, and the next tokens of prompts.

        Args:
            chunks: (node, how many tokens to compute); a node comes after those it continues.
            drafts: the guesses and masks of each row; empty if there are none at all.
            layers: whose states are returned as well (see `LocalModel.look`).
            masks: how many masks follow a prompt whose logits a call needs.
        """
        feed, placed = self._feed(drafts), list[Chunk]()
        written = len(feed.keep)
        for node, count in chunks:
            is_asked = node.needs_logits and node.done + count == len(node.tokens)
            placed.append(feed.take_chunk(node, count, min(masks, self.model.context - node.end) if is_asked else 0))
            if is_asked:
                feed.keep.append(placed[-1].end - 1)
        lengths = [row.length for row in self.rows]
        most = max((draft.num_rows for draft in drafts), default=1)
        self.store.reserve(len(self.rows), max(lengths, default=0) + most)
        sizes = [draft.num_rows for draft in drafts] or [1] * len(self.rows)
        logits, states = self._run(feed, self._steps(feed, sizes, placed, drafts), layers)
        kept = dict(zip(feed.keep[written:], logits[written:], strict=True))
        ends = [kept.get(chunk.end - 1) for chunk in placed]
        ends = [None if end is None else end.clone() for end in ends]
        if states is None:
            return BatchOutput(logits[:written], ends, [], [], [])
        by_row = list(states[: sum(sizes)].split(sizes))
        ahead = [states[chunk.end - 1 : chunk.end + chunk.masks] for chunk in placed]
        read = [states[chunk.place : chunk.end] for chunk in placed]
        return BatchOutput(logits[:written], ends, by_row, ahead, read)

    def _steps(
        self, feed: BatchFeed, sizes: Sequence[int], placed: Sequence[Chunk], drafts: Sequence[DraftTree]
    ) -> list[AttentionStep]:
        """Computes the attention of rows and chunks together, or of several parts that are in flight between ranks."""
        counts = [*sizes, *(chunk.count + chunk.masks for chunk in placed)]
        # A trained head finds its masks by their places in the whole row.
        parts = 1 if feed.masks else self.model.parts_of(len(counts), sum(counts))
        num_rows, steps = len(self.rows), list[AttentionStep]()
        for part, start in _parts(counts, parts):
            rows = slice(min(part.start, num_rows), min(part.stop, num_rows))
            own = placed[max(0, part.start - num_rows) : max(0, part.stop - num_rows)]
            where = rows.start, rows.stop
            if where not in self._branches:
                self._branches[where] = branches_of([row.shared for row in self.rows[rows]], self.model.device)
            step = AttentionStep(
                self.store if parts == 1 else self.store.some(rows),
                [row.length for row in self.rows[rows]],
                self._branches[where],
                [replace(chunk, place=chunk.place - start) for chunk in own],
                [draft.row_parents for draft in drafts[rows]],
            )
            steps.append(step)
        return steps

    def _run(
        self, feed: BatchFeed, steps: Sequence[AttentionStep], layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        how = (feed.tokens, feed.positions, feed.keep, steps, feed.marks)
        if not layers:
            return self.model.forward(*how), None
        return self.model.look(*how, masks=feed.masks, layers=layers)

    def _feed(self, drafts: Sequence[DraftTree]) -> BatchFeed:
        """Lists what the rows feed in a step."""
        rows = self.rows
        if not drafts:
            fed = [row.next_token for row in rows], [row.position for row in rows], [row.mark for row in rows]
            return BatchFeed(*fed, list(range(len(rows))))
        feed = BatchFeed()
        for row, draft in zip(rows, drafts, strict=True):
            feed.take_draft(row, draft)
        return feed

    def advance(self, row: Row, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Adds the tokens that were fed and kept to a row.

        Args:
            row: the row.
            path: the nodes of its draft that are kept, node 0 first.
            tokens: what was drawn after each of them; the last is fed next.
        """
        if path[-1] >= len(path):  # other nodes lie between them
            self.store.gather(self.rows.index(row), row.length, path)
        row.tail += (row.next_token, *tokens[:-1])
        row.next_token = tokens[-1]

    def clear(self, row: Row, first: int) -> None:
        """Empties a row's own slots from one on: hidden keys have weight 0 as well, and 0 * nan is nan."""
        self.store.clear(self.rows.index(row), first)

    def keys_of(self, row: Row) -> tuple[Tensor, Tensor]:
        """Returns keys and values `[layers, kv_heads, tokens, head_dim]` of a row's own tokens, as views."""
        place, own = self.rows.index(row), slice(row.copied, row.length)
        return self.store.keys[:, place, :, own], self.store.values[:, place, :, own]


def _is_short(node: PrefixNode) -> bool:
    alone = node.users <= 1 and len(node.children) <= 1
    return len(node.tokens) <= (_SHORT_ALONE if alone else _SHORT)


def _parts(counts: Sequence[int], parts: int) -> list[tuple[slice, int]]:
    """Shares texts out to at most so many parts of about as many tokens; returns each part and its first token.

    >>> _parts([1, 1, 6], 2)
    [(slice(0, 2, None), 0), (slice(2, 3, None), 2)]
    """
    ends = list(itertools.accumulate(counts))
    numbers = [min(parts - 1, (end - 1) * parts // ends[-1]) for end in ends]
    shares, first = list[tuple[slice, int]](), 0
    for _, members in itertools.groupby(numbers):
        last = first + len(list(members))
        shares.append((slice(first, last), ends[first] - counts[first]))
        first = last
    return shares
