"""The calls of a run as a graph: what was made of what, who waited for whom, and what that cost in tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Request

__all__ = ["CallGraph", "CallNode"]


@dataclass(kw_only=True, slots=True)
class CallNode:
    """A call.

    Attributes:
        name: its id.
        request: what was asked.
        reads: calls whose text is in its prompt.
        waits: calls it could not begin before, though none of their text is in it: a vote, a barrier.
        written: tokens so far.
        completion: what came back; None while it runs.
        start: seconds since the run began.
        end: likewise.
        replayed: it was in the journal.
        waste: its tokens were spent on nothing: it was halted or cancelled.
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

    @property
    def tokens(self) -> int:
        """Tokens it wrote so far."""
        return 0 if self.completion is None else self.completion.usage.completion

    @property
    def waste(self) -> bool:
        """Whether it was halted or cancelled."""
        return self.completion is not None and self.completion.finish in ("halted", "cancelled")


@dataclass(slots=True)
class CallGraph:
    """Calls by name, in the order they began; every edge leads to an earlier one."""

    nodes: dict[str, CallNode] = field(default_factory=dict)

    def add(self, node: CallNode) -> CallNode:
        """Adds a call.

        Raises:
            ArgumentError: it has the name of another, or depends on one that is not here.
        """
        if node.name in self.nodes:
            raise ArgumentError(
                f"call {node.name} is in the graph already; give its branch a path or sample of its own"
            )
        for name in (*node.reads, *node.waits):
            if name not in self.nodes:
                raise ArgumentError(f"call {node.name} depends on {name}, which is not a call of this run")
        self.nodes[node.name] = node
        return node

    def longest(self, ends: Collection[str], *, waits: bool) -> int:
        """Tokens of the longest chain of calls that ends in one of some.

        Args:
            ends: names of calls.
            waits: whether waiting counts as an edge, and not reading alone.
        """
        found: dict[str, int] = {}
        for name, node in self.nodes.items():  # edges lead to earlier ones, so one pass is enough
            before = (*node.reads, *node.waits) if waits else node.reads
            found[name] = node.tokens + max((found[other] for other in before), default=0)
        return max((found[name] for name in ends), default=0)

    def ancestors(self, ends: Iterable[str]) -> set[str]:
        """Some calls and all they were made of."""
        seen, left = set(), list(ends)
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += self.nodes[name].reads
        return seen

    def summary(self, accepted: Collection[str], awaited: Collection[str]) -> Mapping[str, Any]:
        """What a run cost.

        Args:
            accepted: the calls the answer was taken from.
            awaited: all calls that had to end before there was an answer; those of `accepted` among them.

        Returns:
            ``calls``; ``tokens_total``, written by all calls, cancelled ones as far as they got;
            ``tokens_accepted``, the longest chain of reading that ends in the answer; ``tokens_critical``, the
            longest chain of reading and waiting: with enough workers, the time of the run in tokens;
            ``tokens_cancelled``, of calls that were halted or cancelled; ``tokens_wasted``, of failed attempts, which
            are in no other number; ``prefill``, prompt tokens;
            ``prefill_cached`` of them; ``estimated``, calls whose counts are not the engine's own; ``truncated``, calls
            that ran out of tokens; ``seconds``, until the last call ended.
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
            "prefill": sum(u.prompt for u in usage),
            "prefill_cached": sum(u.cached for u in usage),
            "estimated": sum(not u.reported for u in usage),
            "truncated": sum(node.completion.finish == "length" for node in done if node.completion is not None),
            "seconds": max((node.end for node in done if node.end is not None), default=0.0),
        }
