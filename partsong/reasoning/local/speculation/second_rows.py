"""Keeps what a second model knows of texts: the keys of prompts, which texts share, and a row for each text."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.reasoning.local.batch import Batch
from partsong.reasoning.local.batch_feed import BatchRow
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_node import PrefixNode
from partsong.reasoning.local.prefix_tree import PrefixTree

__all__ = ["SecondRows"]

#: Tokens of prompts whose keys are kept after use.
_KEPT = 4096


class SecondRows:
    """Reads prompts with a second model and gives texts their rows.

    Args:
        model: the second model.

    Attributes:
        batch: the rows.
    """

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.batch: Batch[BatchRow] = Batch(model)
        self._tree = PrefixTree(model.room_for, _KEPT, self.batch.note_cut)

    def place(self, tokens: Sequence[int]) -> PrefixNode:
        """Returns the node of a text's tokens but the last, whose keys `read` computes, and keeps it until `begin`."""
        leaf = self._tree.place(tokens[:-1])[0]
        leaf.users += 1
        return leaf

    def read(self, leaves: Sequence[PrefixNode], most: int | None = None) -> None:
        """Computes keys of prompts, those of the first leaves first.

        Args:
            leaves: the last nodes of the prompts.
            most: how many tokens are computed; None computes all.
        """
        chunks = dict[PrefixNode, int]()
        for leaf in leaves:
            for node in leaf.chain():
                if node.complete or node in chunks:
                    continue
                left = len(node.tokens) if most is None else most - sum(chunks.values())
                if not left:
                    break
                chunks[node] = min(len(node.tokens) - node.done, left)
        if chunks:
            self.batch.forward(list(chunks.items()))  # rows compute, too, but do not go on
        for node, count in chunks.items():
            node.done += count

    def begin(self, leaf: PrefixNode, token: int) -> BatchRow:
        """Returns the row of a text whose prompt was read, which goes on with a token."""
        row = BatchRow(leaf, token)
        self.batch.join(row)
        leaf.users -= 1
        return row

    def give_up(self, leaf: PrefixNode) -> None:
        """Drops a prompt that no row continues."""
        leaf.users -= 1
        self._tree.trim()

    def drop(self, row: BatchRow) -> None:
        """Drops the row of a text that has ended."""
        self.batch.leave(row)
        self._tree.trim()
