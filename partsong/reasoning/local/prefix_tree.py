"""Keys and values of token sequences as a tree: what two sequences begin with is computed and kept once.

A node owns the keys of a run of tokens; the nodes from the root to it spell a sequence. A node is cut in two where
sequences part, which makes two views of its memory and copies nothing. Like the radix tree of SGLang (Zheng et al.,
arXiv 2312.07104), section 3; the difference is that branches which are still being written keep their own keys apart
until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

__all__ = ["Node", "PrefixTree", "common_length"]

#: Tokens two sequences must share inside a node before it is cut: every cut makes attention a little slower.
_WORTH_A_CUT = 16

#: Makes room for the keys and values of so many tokens, each `[layers, kv_heads, tokens, head_dim]`.
Allocate = Callable[[int], tuple[Tensor, Tensor]]


class Node:
    """A run of tokens behind its parent's.

    Attributes:
        tokens: of this run.
        parent: the run before; None for the root.
        start: position of the first token.
        keys: `[layers, kv_heads, tokens, head_dim]`.
        values: of the same shape.
        done: tokens whose keys have been computed.
        logits: `[vocabulary]` behind the last token, where somebody asked for them.
        asked: whether somebody waits for the logits.
        users: rows and waiting calls that hold on to it; with none it may be dropped.
        used: when it was last of use.
    """

    __slots__ = ("asked", "children", "done", "keys", "logits", "parent", "start", "tokens", "used", "users", "values")

    def __init__(self, tokens: list[int], parent: Node | None, keys: Tensor | None, values: Tensor | None) -> None:
        self.tokens, self.parent = tokens, parent
        self.keys, self.values = keys, values
        self.start: int = 0 if parent is None else parent.start + len(parent.tokens)
        self.children: list[Node] = []
        self.done = self.users = self.used = 0
        self.logits: Tensor | None = None
        self.asked = False

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether all keys have been computed."""
        return self.done == len(self.tokens)

    def chain(self) -> list[Node]:
        """The nodes that spell the sequence, first to last, without the root."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class PrefixTree:
    """All sequences whose keys are kept.

    Args:
        allocate: makes room for new tokens.
        limit: most tokens kept once nobody uses them.

    >>> import torch
    >>> tree = PrefixTree(lambda tokens: (torch.zeros(1, 1, tokens, 2), torch.zeros(1, 1, tokens, 2)), limit=100)
    >>> first, found = tree.place(list(range(40)))
    >>> second, found = tree.place([*range(20), 7])
    >>> found, [len(node.tokens) for node in second.chain()]
    (20, [20, 1])
    """

    def __init__(self, allocate: Allocate, limit: int) -> None:
        self.allocate, self.limit = allocate, limit
        self.root = Node([], None, None, None)
        self.tokens = 0
        self._clock = 0

    def place(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """The node whose chain spells the tokens; what is missing is added, its keys still to be computed.

        Returns:
            The node and how many of the tokens were there already.
        """
        node, found = self._walk(tokens)
        if found < len(tokens):
            node = self.add(node, list(tokens[found:]))
        self._touch(node)
        return node, found

    def add(self, parent: Node, tokens: list[int]) -> Node:
        """A new run behind a node."""
        keys, values = self.allocate(len(tokens))
        node = Node(tokens, parent, keys, values)
        parent.children.append(node)
        self.tokens += len(tokens)
        self._touch(node)
        return node

    def cut(self, node: Node, length: int) -> Node:
        """Cuts a node in two; the node itself becomes the second part, so who holds it holds the same sequence.

        Returns:
            The first part, of `length` tokens.
        """
        parent = node.parent
        assert parent is not None and node.keys is not None and node.values is not None
        assert 0 < length < len(node.tokens)
        first = Node(node.tokens[:length], parent, node.keys[:, :, :length], node.values[:, :, :length])
        first.done, first.used = min(node.done, length), node.used
        first.children = [node]
        parent.children[parent.children.index(node)] = first
        node.keys, node.values = node.keys[:, :, length:], node.values[:, :, length:]
        node.tokens, node.parent = node.tokens[length:], first
        node.start, node.done = first.end, max(node.done - length, 0)
        return first

    def drop(self, node: Node) -> None:
        """Takes a node nobody uses out of the tree."""
        assert not node.users and not node.children and node.parent is not None
        node.parent.children.remove(node)
        self.tokens -= len(node.tokens)
        node.keys = node.values = node.logits = None

    def trim(self) -> None:
        """Drops what was not used for longest until the rest is within the limit; what is in use stays."""
        while self.tokens > self.limit:
            idle = [node for node in self.nodes() if not node.users and not node.children]
            if not idle:
                return
            for node in sorted(idle, key=lambda node: node.used):
                if self.tokens <= self.limit:
                    return
                self.drop(node)

    def nodes(self) -> Iterator[Node]:
        """All of them, without the root."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def _walk(self, tokens: Sequence[int]) -> tuple[Node, int]:
        node, found = self.root, 0
        while found < len(tokens):
            best, length = None, 0
            for child in node.children:
                shared = common_length(child.tokens, tokens, found)
                whole = shared == len(child.tokens)
                if shared > length and (whole or shared >= _WORTH_A_CUT):
                    best, length = child, shared
            if best is None:
                break
            node = best if length == len(best.tokens) else self.cut(best, length)
            found += length
        return node, found

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for each in node.chain():
            each.used = self._clock


def common_length(first: Sequence[int], second: Sequence[int], offset: int = 0) -> int:
    """How many tokens `first` shares with `second` from `offset` on, from the beginning.

    >>> common_length([1, 2, 3], [9, 1, 2, 4], 1)
    2
    """
    most = min(len(first), len(second) - offset)
    for index in range(most):
        if first[index] != second[offset + index]:
            return index
    return most
