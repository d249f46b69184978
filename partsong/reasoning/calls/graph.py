"""Keeps the calls of a run as a graph: which call reads or waited for which, and the cost in tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Request, Usage

__all__ = ["CallGraph", "CallNode"]


@dataclass(kw_only=True, slots=True)
class CallNode:
    """Describes a call of a run.

    Attributes:
        name: id of the call.
        request: what was asked.
        reads: calls whose text is in its prompt.
        waits: calls that had to end before it could begin, though it reads none of their text: a vote, a barrier.
        written: tokens written so far.
        completion: what came back; None while it runs.
        start: seconds from the beginning of the run to that of the call.
        end: seconds from the beginning of the run to the end of the call.
        replayed: whether it was in the journal.
        cut: cost of an earlier attempt, from the journal of a resumed run; None if there was none.
    """

    name: str
    request: Request
    reads: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    written: int = 0
    completion: Completion | None = None
    start: float = 0.0
    end: float | None = None
    replayed: bool = False
    cut: Usage | None = None

    @property
    def tokens(self) -> int:
        """Returns the number of tokens the call wrote; 0 while it runs."""
        return 0 if self.completion is None else self.completion.usage.completion

    @property
    def waste(self) -> bool:
        """Returns whether the call was halted or cancelled, so that its tokens were spent on nothing."""
        return self.completion is not None and self.completion.finish in ("halted", "cancelled")


@dataclass(slots=True)
class CallGraph:
    """Holds calls by name, in the order they began; every edge leads to an earlier one."""

    nodes: dict[str, CallNode] = field(default_factory=dict)

    def add(self, node: CallNode) -> CallNode:
        """Adds a call.

        Raises:
            ArgumentError: it has the name of another call, or depends on one that is not in the graph.
        """
        if node.name in self.nodes:
            raise ArgumentError(f"call {node.name} is in the graph already; give it a path or sample of its own")
        for name in (*node.reads, *node.waits):
            if name not in self.nodes:
                raise ArgumentError(f"call {node.name} depends on {name}, which is not a call of this run")
        self.nodes[node.name] = node
        return node

    def longest(self, ends: Collection[str], *, waits: bool) -> int:
        """Returns the tokens of the longest chain of reading, and of waiting if `waits`, that ends in one of `ends`."""
        tokens: dict[str, int] = {}
        for name, node in self.nodes.items():  # edges lead to earlier calls, so one pass is enough
            before = (*node.reads, *node.waits) if waits else node.reads
            tokens[name] = node.tokens + max((tokens[other] for other in before), default=0)
        return max((tokens[name] for name in ends), default=0)

    def ancestors(self, ends: Iterable[str]) -> set[str]:
        """Returns the calls in `ends` and all calls they read, directly or through others."""
        seen, left = set(), list(ends)
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += self.nodes[name].reads
        return seen

    def summary(self, accepted: Collection[str], awaited: Collection[str]) -> Mapping[str, Any]:
        """Sums up what a run cost.

        Args:
            accepted: the calls the answer was taken from.
            awaited: all calls that had to end before there was an answer, with those of `accepted`.

        Returns:
            A dictionary with these numbers.

            - ``calls``: calls made.
            - ``tokens_total``: tokens written by all calls; a cancelled call counts up to where it got.
            - ``tokens_accepted``: the longest chain of reading that ends in the answer.
            - ``tokens_critical``: the longest chain of reading and waiting. With enough workers this is the time of the
              run, in tokens.
            - ``tokens_cancelled``: tokens of calls that were halted or cancelled.
            - ``tokens_wasted``: tokens of failed attempts, which are in no other number.
            - ``tokens_drafted``: tokens that the engine guessed ahead; ``tokens_rejected`` of them were rejected.
            - ``prefill``: prompt tokens; ``prefill_cached`` of them had their keys already.
            - ``estimated``: calls whose tokens the engine did not count.
            - ``truncated``: calls that ran out of tokens.
            - ``seconds``: time until the last call ended.
        """
        done = [node for node in self.nodes.values() if node.completion is not None]
        usage = [node.completion.usage for node in done if node.completion is not None]
        return {
            "calls": len(self.nodes),
            "tokens_total": sum(node.tokens for node in done),
            "tokens_accepted": self.longest(accepted, waits=False),
            "tokens_critical": self.longest({*accepted, *awaited}, waits=True),
            "tokens_cancelled": sum(node.tokens for node in done if node.waste),
            "tokens_wasted": sum(u.wasted for u in usage),
            "tokens_drafted": sum(u.drafted for u in usage),
            "tokens_rejected": sum(u.rejected for u in usage),
            "prefill": sum(u.prompt for u in usage),
            "prefill_cached": sum(u.cached for u in usage),
            "estimated": sum(not u.reported for u in usage),
            "truncated": sum(node.completion.finish == "length" for node in done if node.completion is not None),
            "seconds": max((node.end for node in done if node.end is not None), default=0.0),
        }
