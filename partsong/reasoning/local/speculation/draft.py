"""Describes guesses at the next tokens of a text: a chain, or a tree where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from partsong.errors import ArgumentError

__all__ = ["DraftTree"]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Holds a tree of guessed tokens under the last token of a text.

    Node 0 is that last token; node i guesses ``tokens[i - 1]`` after the path to its parent.

    Attributes:
        tokens: a token for each node after the first.
        parents: the node before each of them; it comes earlier, and its children differ.
        depths: how many tokens after the last one each node lies, node 0 included.

    Raises:
        ArgumentError: the numbers of tokens and parents differ, a parent comes later, or a guess is made twice.

    >>> DraftTree.chain([7, 8]).parents
    (0, 1)
    >>> DraftTree((7, 9, 8), (0, 0, 1)).child(0, 9)
    2
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(init=False)
    _children: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ArgumentError(f"a draft of {len(self.tokens)} tokens was given {len(self.parents)} parents")
        depths, children = [0], dict[tuple[int, int], int]()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            if not 0 <= parent < node:
                raise ArgumentError(f"node {node} of a draft follows node {parent}; a parent comes before its children")
            if (parent, token) in children:
                raise ArgumentError(f"node {node} of a draft guesses token {token} after node {parent} a second time")
            children[parent, token] = node
            depths.append(depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "_children", children)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """Makes a draft whose tokens follow each other."""
        return cls(tuple(tokens), tuple(range(len(tokens))))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Says whether every node but the last has one child."""
        return self.parents == tuple(range(len(self.tokens)))

    def child(self, node: int, token: int) -> int | None:
        """Returns the node that guesses a token after a node; None where nobody guessed it."""
        return self._children.get((node, token))

    def ancestors(self, node: int) -> list[int]:
        """Lists the nodes on the way to a node, node 0 first and the node itself last."""
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1] - 1])
        return path[::-1]
