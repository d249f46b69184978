"""Keys and values of token sequences as a tree: what two sequences begin with is computed and kept once.

A node owns the keys of a run of tokens; the nodes from the root to it spell a sequence. A node is cut in two where
sequences part, which makes two views of its memory and copies nothing. Like the radix tree of SGLang (Zheng et al.,
arXiv 2312.07104), section 3; the differences are that branches which are still being written keep their own keys apart
until they end, and that threads can join: a node without tokens whose sequence is what stands before the threads, then
all of them. It copies nothing either. What follows it has its position behind the longest thread (Multiverse,
arXiv 2506.09991; ParaThinker, arXiv 2509.04475).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

__all__ = ["PrefixNode", "PrefixTree", "common_length"]

#: Tokens two sequences must share inside a node before it is cut: every cut makes attention a little slower.
_WORTH_A_CUT = 16

#: Makes room for the keys and values of so many tokens, each `[layers, kv_heads, tokens, head_dim]`.
Allocate = Callable[[int], tuple[Tensor, Tensor]]


class PrefixNode:
    """A run of tokens behind its parent's.

    Attributes:
        tokens: of this run.
        parent: the run before; None for the root.
        start: position of the first token. Behind a join it is less than the number of tokens before it.
        keys: `[layers, kv_heads, tokens, head_dim]`.
        values: of the same shape.
        done: tokens whose keys have been computed.
        logits: `[vocabulary]` behind the last token, where somebody asked for them.
        asked: whether somebody waits for the logits.
        users: rows and waiting calls that hold on to it; with none it may be dropped.
        used: when it was last of use.
        mark: thought embedding of the tokens; 0 is none.
        joined: the last nodes of the threads that come together here, all below the parent; empty elsewhere.
    """

    __slots__ = (
        "asked", "children", "done", "joined", "keys", "logits", "mark", "parent", "start", "tokens", "used", "users",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        tokens: list[int],
        parent: PrefixNode | None,
        keys: Tensor | None,
        values: Tensor | None,
        mark: int = 0,
        joined: Sequence[PrefixNode] = (),
    ) -> None:
        self.tokens, self.parent = tokens, parent
        self.keys, self.values = keys, values
        self.mark, self.joined = mark, tuple(joined)
        self.start: int = max((node.end for node in (*self.joined, *([parent] if parent else []))), default=0)
        self.children: list[PrefixNode] = []
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

    def chain(self) -> list[PrefixNode]:
        """The nodes that spell the sequence, first to last, without the root."""
        return self._down_to(None)[::-1]

    def _down_to(self, end: PrefixNode | None) -> list[PrefixNode]:
        """The nodes from here to the one below `end`, last to first, those without tokens left out."""
        found: list[PrefixNode] = []
        node: PrefixNode | None = self
        while node is not end and node is not None and node.parent is not None:
            if node.tokens:
                found.append(node)
            for thread in node.joined[::-1]:
                found += thread._down_to(node.parent)
            node = node.parent
        return found


class PrefixTree:
    """All sequences whose keys are kept.

    Args:
        allocate: makes room for new tokens.
        limit: most tokens kept once nobody uses them.
        on_cut: told of the two parts of a node that was cut, the first and the one that it now is.

    >>> import torch
    >>> tree = PrefixTree(lambda tokens: (torch.zeros(1, 1, tokens, 2), torch.zeros(1, 1, tokens, 2)), limit=100)
    >>> first, found = tree.place(list(range(40)))
    >>> second, found = tree.place([*range(20), 7])
    >>> found, [len(node.tokens) for node in second.chain()]
    (20, [20, 1])
    """

    def __init__(
        self,
        allocate: Allocate,
        limit: int,
        on_cut: Callable[[PrefixNode, PrefixNode], None] = lambda first, second: None,
    ) -> None:
        self.allocate, self.limit, self.on_cut = allocate, limit, on_cut
        self.root = PrefixNode([], None, None, None)
        self.tokens = 0
        self._clock = 0

    def place(
        self, tokens: Sequence[int], after: PrefixNode | None = None, *, mark: int = 0, least: int | None = None
    ) -> tuple[PrefixNode, int]:
        """The node whose chain spells the tokens; what is missing is added, its keys still to be computed.

        Args:
            tokens: of the run.
            after: the node it stands behind; None is the root.
            mark: thought embedding of the tokens.
            least: tokens that must be shared with a part of a node for it to be cut; None is what pays.

        Returns:
            The node and how many of the tokens were there already.
        """
        node, found = self._walk(
            self.root if after is None else after, tokens, mark, _WORTH_A_CUT if least is None else least
        )
        if found < len(tokens):
            node = self.add(node, list(tokens[found:]), mark)
        self._touch(node)
        return node, found

    def join(self, fork: PrefixNode, threads: Sequence[PrefixNode]) -> PrefixNode:
        """The node behind threads that parted at a node."""
        for child in fork.children:
            # Nodes are equal only to themselves.
            if child.joined == tuple(threads):
                return child
        node = PrefixNode([], fork, None, None, joined=threads)
        fork.children.append(node)
        for thread in threads:
            thread.users += 1
        return node

    def add(self, parent: PrefixNode, tokens: list[int], mark: int = 0) -> PrefixNode:
        """A new run behind a node."""
        keys, values = self.allocate(len(tokens))
        node = PrefixNode(tokens, parent, keys, values, mark)
        parent.children.append(node)
        self.tokens += len(tokens)
        self._touch(node)
        return node

    def cut(self, node: PrefixNode, length: int) -> PrefixNode:
        """Cuts a node in two; the node itself becomes the second part, so who holds it holds the same sequence.

        Returns:
            The first part, of `length` tokens.
        """
        parent = node.parent
        assert parent is not None and node.keys is not None and node.values is not None
        assert 0 < length < len(node.tokens)
        first = PrefixNode(
            node.tokens[:length], parent, node.keys[:, :, :length], node.values[:, :, :length], node.mark
        )
        first.done, first.used = min(node.done, length), node.used
        first.children = [node]
        parent.children[parent.children.index(node)] = first
        node.keys, node.values = node.keys[:, :, length:], node.values[:, :, length:]
        node.tokens, node.parent = node.tokens[length:], first
        node.start, node.done = first.end, max(node.done - length, 0)
        self.on_cut(first, node)
        return first

    def drop(self, node: PrefixNode) -> None:
        """Takes a node nobody uses out of the tree."""
        assert not node.users and not node.children and node.parent is not None
        node.parent.children.remove(node)
        for thread in node.joined:
            thread.users -= 1
        self.tokens -= len(node.tokens)
        node.keys = node.values = node.logits = node.parent = None

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

    def nodes(self) -> Iterator[PrefixNode]:
        """All of them, without the root."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def _walk(self, node: PrefixNode, tokens: Sequence[int], mark: int, least: int) -> tuple[PrefixNode, int]:
        found = 0
        while found < len(tokens):
            best, length = None, 0
            for child in node.children:
                shared = common_length(child.tokens, tokens, found)
                whole = shared == len(child.tokens)
                if shared > length and child.mark == mark and (whole or shared >= least):
                    best, length = child, shared
            if best is None:
                break
            node = best if length == len(best.tokens) else self.cut(best, length)
            found += length
        return node, found

    def _touch(self, node: PrefixNode) -> None:
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
