"""Holds a run of tokens and their keys: the node of a tree in which a common beginning is kept once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Allocate", "PrefixNode"]

#: Makes room for the keys and values of a number of tokens, each `[layers, kv_heads, tokens, head_dim]`.
Allocate = Callable[[int], tuple[Tensor, Tensor]]


class PrefixNode:
    """Holds a run of tokens that follows its parent's.

    Attributes:
        tokens: the tokens of this run.
        parent: the run before; None for the root.
        start: position of the first token. After a join it is less than the number of tokens before it.
        keys: `[layers, kv_heads, tokens, head_dim]`.
        values: of the same shape.
        done: how many tokens have their keys computed.
        logits: the logits `[vocabulary]` after the last token, if a call needed them.
        ahead: states of the last token and of masks after it, if drafters look ahead (see `BatchOutput`).
        states: those of the tokens whose keys are computed, `[tokens, layers, hidden size]`, if drafters read prompts.
        needs_logits: whether a call waits for the logits.
        users: how many rows and waiting calls use it; without users it may be dropped.
        used: the time of the last use, by the tree's clock.
        mark: thought embedding of the tokens; 0 for no embedding.
        joined: the last nodes of the threads that are joined here, all below the parent; empty elsewhere.
    """

    __slots__ = (
        "ahead", "children", "done", "joined", "keys", "logits", "mark", "needs_logits", "parent", "start", "states",
        "tokens", "used", "users", "values",
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
        self.ahead: Tensor | None = None
        self.states: Tensor | None = None
        self.needs_logits = False

    @property
    def end(self) -> int:
        """Returns the position after the last token."""
        return self.start + len(self.tokens)

    @property
    def complete(self) -> bool:
        """Returns whether all keys have been computed."""
        return self.done == len(self.tokens)

    def take_states(self, states: Tensor) -> None:
        """Keeps the states of the next tokens."""
        if self.states is None:
            self.states = states.new_empty(len(self.tokens), *states.shape[1:])
        self.states[self.done : self.done + len(states)] = states

    def states_before(self) -> Tensor | None:
        """Returns the states of the sequence that ends here, as far back as they are known; None where none are."""
        known: list[Tensor] = []
        for node in self._down_to(None):
            if node.states is None:
                break
            known.append(node.states[: node.done])
        return torch.cat(known[::-1]) if known else None

    def chain(self) -> list[PrefixNode]:
        """Lists the nodes that spell the sequence, first to last, without the root."""
        return self._down_to(None)[::-1]

    def _down_to(self, end: PrefixNode | None) -> list[PrefixNode]:
        """Lists the nodes from here to the one below `end`, last to first, leaving out those without tokens."""
        nodes: list[PrefixNode] = []
        node: PrefixNode | None = self
        while node is not end and node is not None and node.parent is not None:
            if node.tokens:
                nodes.append(node)
            for thread in node.joined[::-1]:
                nodes += thread._down_to(node.parent)
            node = node.parent
        return nodes
