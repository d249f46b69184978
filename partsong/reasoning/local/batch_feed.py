"""Describes the rows of a batch, and collects what a forward reads of them and of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from partsong.kernels.speculation.draft import DraftTree
from partsong.reasoning.local.prefix_node import PrefixNode
from partsong.reasoning.local.shared_attention import Chunk

__all__ = ["BatchFeed", "BatchRow"]


@dataclass(slots=True, eq=False)
class BatchRow:
    """Describes a branch.

    Attributes:
        leaf: the last node that it shares with others.
        next_token: the token fed in the next step.
        mark: the thought embedding of what it writes.
        tail: tokens fed so far, whose keys are the row's own.
        own: nodes of its chain whose keys it has copied. These keys precede those of the tail.
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
        """Counts its own keys."""
        return self.copied + len(self.tail)

    @property
    def position(self) -> int:
        """Returns the position of the next token."""
        return self.leaf.end + len(self.tail)


@dataclass(slots=True)
class BatchFeed:
    """Collects what a forward reads: tokens, their positions and marks, those whose logits are kept, and masks."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    masks: dict[int, int] = field(default_factory=dict)

    def take_draft(self, row: BatchRow, draft: DraftTree) -> None:
        """Adds a row's token, its guesses, and the masks after them."""
        begin, position = len(self.tokens), row.position
        self.keep += range(begin, begin + len(draft.depths))
        self.tokens += (row.next_token, *draft.tokens)
        self.positions += [position + depth for depth in draft.depths]
        for depth, num in zip(draft.depths, draft.masks, strict=False):
            self._take_masks(position + depth, num)
        self.marks += [row.mark] * draft.num_rows

    def take_chunk(self, node: PrefixNode, count: int, masks: int) -> Chunk:
        """Adds tokens of a prompt, and masks after them."""
        chunk = Chunk(node, node.done, count, len(self.tokens), masks)
        self.tokens += node.tokens[node.done : node.done + count]
        self.positions += range(node.start + node.done, node.start + node.done + count)
        self._take_masks(self.positions[-1], masks)
        self.marks += [node.mark] * (count + masks)
        return chunk

    def _take_masks(self, after: int, num: int) -> None:
        for number in range(num):
            self.masks[len(self.tokens)] = number
            self.tokens.append(0)
            self.positions.append(after + 1 + number)
