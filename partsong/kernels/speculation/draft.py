"""Describes guesses at the next tokens of a text, a chain or a tree where they split, and masks that look further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

from partsong.errors import ArgumentError

__all__ = ["DraftTree"]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Holds a tree of guessed tokens under the last token of a text.

    Node 0 is that last token; node i guesses ``tokens[i - 1]`` after the path to its parent. Masks may follow a
    node: further rows of the forward that show the model's predictions for the positions after it. A step feeds the
    nodes of a text and then all masks, those of node 0 first.

    Attributes:
        tokens: a token for each node after the first.
        parents: the node before each of them; it comes earlier, and its children differ.
        chances: how likely each guess is if its parent is right, in [0, 1]; empty if unknown.
        masks: how many masks follow each node, node 0 included; empty for none. Each mask follows the one before.
        depths: how many tokens after the last one each node lies, node 0 included.

    Raises:
        ArgumentError: there are not as many tokens as parents and chances, not as many numbers of masks as nodes, a
            parent comes later, or a guess is made twice.

    >>> DraftTree.chain([7, 8]).parents
    (0, 1)
    >>> DraftTree((7, 9, 8), (0, 0, 1)).child(0, 9)
    2
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    masks: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(init=False)
    _children: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ArgumentError(f"a draft of {len(self.tokens)} tokens was given {len(self.parents)} parents")
        if self.chances and len(self.chances) != len(self.tokens):
            raise ArgumentError(f"a draft of {len(self.tokens)} tokens was given {len(self.chances)} chances")
        if self.masks and len(self.masks) != 1 + len(self.tokens):
            raise ArgumentError(
                f"a draft of {len(self.tokens)} tokens was given masks behind {len(self.masks)} nodes; give a number "
                f"for each node and for node 0"
            )
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
    def chain(cls, tokens: Sequence[int], chances: Sequence[float] = ()) -> DraftTree:
        """Makes a draft whose tokens follow each other."""
        return cls(tuple(tokens), tuple(range(len(tokens))), tuple(chances))

    @classmethod
    def union(cls, drafts: Sequence[DraftTree]) -> DraftTree:
        """Puts several drafts into one tree; a guess that two of them make has the better of its chances.

        >>> DraftTree.union([DraftTree.chain([7, 8]), DraftTree.chain([7, 9])]).parents
        (0, 1, 1)
        """
        tokens, parents, chances = list[int](), list[int](), list[float]()
        nodes = dict[tuple[int, int], int]()
        for draft in drafts:
            here = [0]
            for token, parent, chance in zip(draft.tokens, draft.parents, draft.known_chances, strict=True):
                place = (here[parent], token)
                if place in nodes:
                    chances[nodes[place] - 1] = max(chances[nodes[place] - 1], chance)
                else:
                    tokens.append(token)
                    parents.append(here[parent])
                    chances.append(chance)
                    nodes[place] = len(tokens)
                here.append(nodes[place])
        return cls(tuple(tokens), tuple(parents), tuple(chances))

    def part(self, nodes: Sequence[int]) -> DraftTree:
        """Keeps some of the nodes, in rising order, without masks; the parent of each is kept, too. Node 0 stays."""
        place = {0: 0} | {node: number for number, node in enumerate(nodes, 1)}
        tokens, parents = [self.tokens[node - 1] for node in nodes], [place[self.parents[node - 1]] for node in nodes]
        return DraftTree(tuple(tokens), tuple(parents), tuple(self.known_chances[node - 1] for node in nodes))

    def within(self, room: int, vocabulary: int | None) -> DraftTree:
        """Keeps the guesses that can be verified: not too deep, and each a token; their chances lie in [0, 1].

        Args:
            room: how many tokens the text may have after node 0.
            vocabulary: how many tokens there are; None allows any.

        >>> DraftTree.chain([5, 6, 99, 7], [2.0, 0.5, 0.5, 0.5]).within(3, 50).known_chances
        (1.0, 0.5)
        """
        kept = {0}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            is_token = isinstance(token, Integral) and 0 <= token < (vocabulary or token + 1)
            if is_token and parent in kept and self.depths[node] <= room:
                kept.add(node)
        if len(kept) == 1 + len(self) and all(0.0 <= chance <= 1.0 for chance in self.chances):
            return self
        part = self.part(sorted(kept)[1:])
        # The comparison turns a NaN into 0.
        return replace(part, chances=tuple(min(chance, 1.0) if chance > 0.0 else 0.0 for chance in part.chances))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Counts the rows that a step feeds: nodes, node 0 included, and masks."""
        return 1 + len(self.tokens) + sum(self.masks)

    @property
    def row_parents(self) -> tuple[int, ...]:
        """Lists, for each row fed after the first, the row before it in its path, as `parents` does for nodes."""
        if not self.masks:
            return self.parents
        rows = list(self.parents)
        for node, num in enumerate(self.masks):
            if num:
                rows += (node, *range(len(rows) + 1, len(rows) + num))
        return tuple(rows)

    def masks_after(self, node: int) -> slice:
        """Returns the fed rows that are the masks after a node."""
        begin = 1 + len(self.tokens) + sum(self.masks[:node])
        return slice(begin, begin + (self.masks[node] if self.masks else 0))

    @property
    def known_chances(self) -> tuple[float, ...]:
        """Returns the chance of every guess, 1 where unknown."""
        return self.chances or (1.0,) * len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Says whether every node but the last has one child."""
        return self.parents == tuple(range(len(self.tokens)))

    def child(self, node: int, token: int) -> int | None:
        """Returns the node that guesses a token after a node; None if there is no such guess."""
        return self._children.get((node, token))

    def ancestors(self, node: int) -> list[int]:
        """Lists the nodes on the path to a node, node 0 first and the node itself last."""
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1] - 1])
        return path[::-1]

    def along(self, tokens: Sequence[int]) -> list[int]:
        """Follows tokens down the tree as far as they were guessed; node 0 is the first of the nodes returned."""
        path = [0]
        for token in tokens:
            node = self.child(path[-1], token)
            if node is None:
                break
            path.append(node)
        return path
