"""Keeps keys and values of token sequences as a tree: a common beginning of two sequences is computed and kept once.

A node owns the keys of a run of tokens; the nodes from the root to it spell a sequence. A node is cut in two where
sequences split, which makes two views of its memory and copies nothing. It is like the radix tree of SGLang (Zheng et
al., arXiv 2312.07104, section 3), with two differences. Branches that are still being written keep their own keys
separately until they end. And threads can join in a node without tokens: its sequence is the text before the threads,
followed by all of them, and nothing is copied either. The text after a join has positions after the longest thread
(Multiverse, arXiv 2506.09991; ParaThinker, arXiv 2509.04475).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from partsong.reasoning.local.prefix_node import Allocate, PrefixNode

__all__ = ["PrefixTree", "common_length"]

#: Tokens that two sequences must share inside a node before it is cut. Every cut makes attention a little slower.
_WORTH_A_CUT = 16


class PrefixTree:
    """Holds all sequences whose keys are kept.

    Args:
        allocate: makes room for new tokens.
        limit: most unused tokens that are kept.
        on_cut: called with the two parts of a node that was cut. The second part is the node itself.

    >>> import torch
    >>> tree = PrefixTree(lambda tokens: (torch.zeros(1, 1, tokens, 2), torch.zeros(1, 1, tokens, 2)), limit=100)
    >>> first, known = tree.place(list(range(40)))
    >>> second, known = tree.place([*range(20), 7])
    >>> known, [len(node.tokens) for node in second.chain()]
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
        """Returns the node whose chain spells the tokens, and adds missing tokens, whose keys are still to be computed.

        Args:
            tokens: the tokens of the run.
            after: the node that the run follows. Default: the root.
            mark: thought embedding of the tokens.
            least: how many tokens must be shared with a part of a node for it to be cut. Default: as many as
                make a cut worthwhile.

        Returns:
            The node, and how many of the tokens were there already.
        """
        node, known = self._walk(
            self.root if after is None else after, tokens, mark, _WORTH_A_CUT if least is None else least
        )
        if known < len(tokens):
            node = self.add(node, list(tokens[known:]), mark)
        self._touch(node)
        return node, known

    def join(self, fork: PrefixNode, threads: Sequence[PrefixNode]) -> PrefixNode:
        """Returns the node that follows the threads that split at a node."""
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
        """Adds a new run after a node."""
        keys, values = self.allocate(len(tokens))
        node = PrefixNode(tokens, parent, keys, values, mark)
        parent.children.append(node)
        self.tokens += len(tokens)
        self._touch(node)
        return node

    def cut(self, node: PrefixNode, length: int) -> PrefixNode:
        """Cuts a node in two. The node itself becomes the second part, so its users keep the same sequence.

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
        if node.states is not None:
            first.states, node.states = node.states[:length], node.states[length:]
        node.keys, node.values = node.keys[:, :, length:], node.values[:, :, length:]
        node.tokens, node.parent = node.tokens[length:], first
        node.start, node.done = first.end, max(node.done - length, 0)
        self.on_cut(first, node)
        return first

    def drop(self, node: PrefixNode) -> None:
        """Removes an unused node from the tree."""
        assert not node.users and not node.children and node.parent is not None
        node.parent.children.remove(node)
        for thread in node.joined:
            thread.users -= 1
        self.tokens -= len(node.tokens)
        node.keys = node.values = node.logits = node.ahead = node.states = node.parent = None

    def trim(self) -> None:
        """Drops the least recently used nodes until the rest is within the limit. Nodes in use stay."""
        while self.tokens > self.limit:
            idle = [node for node in self.nodes() if not node.users and not node.children]
            if not idle:
                return
            for node in sorted(idle, key=lambda node: node.used):
                if self.tokens <= self.limit:
                    return
                self.drop(node)

    def nodes(self) -> Iterator[PrefixNode]:
        """Yields all nodes, without the root."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def _walk(self, node: PrefixNode, tokens: Sequence[int], mark: int, least: int) -> tuple[PrefixNode, int]:
        known = 0
        while known < len(tokens):
            best, length = None, 0
            for child in node.children:
                shared = common_length(child.tokens, tokens, known)
                whole = shared == len(child.tokens)
                if shared > length and child.mark == mark and (whole or shared >= least):
                    best, length = child, shared
            if best is None:
                break
            node = best if length == len(best.tokens) else self.cut(best, length)
            known += length
        return node, known

    def _touch(self, node: PrefixNode) -> None:
        self._clock += 1
        for each in node.chain():
            each.used = self._clock


def common_length(first: Sequence[int], second: Sequence[int], offset: int = 0) -> int:
    """Counts the tokens that `first` begins with and that `second` has from `offset` on.

    >>> common_length([1, 2, 3], [9, 1, 2, 4], 1)
    2
    """
    longest = min(len(first), len(second) - offset)
    for index in range(longest):
        if first[index] != second[offset + index]:
            return index
    return longest
