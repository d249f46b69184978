"""The cost of a run, read off its graph, against brute force over all chains."""

from __future__ import annotations

import random

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import CallGraph, Completion, Message, Request, Usage
from partsong.reasoning.calls.graph import CallNode


def graph_of(draw: random.Random, size: int) -> CallGraph:
    graph = CallGraph()
    for number in range(size):
        names = [str(i) for i in range(number)]
        reads = tuple(name for name in names if draw.random() < 0.3)
        waits = tuple(name for name in names if draw.random() < 0.2)
        node = graph.add(CallNode(name=str(number), request=Request(messages=()), reads=reads, waits=waits))
        finish = "cancelled" if draw.random() < 0.1 else "stop"
        node.completion = Completion(text="", finish=finish, usage=Usage(completion=draw.randrange(50), prompt=3))
    return graph


def chains(graph: CallGraph, end: str, waits: bool) -> list[int]:
    """The tokens of every chain that ends in a call."""
    node = graph.nodes[end]
    before = set(node.reads) | (set(node.waits) if waits else set())
    longer = [tokens for other in before for tokens in chains(graph, other, waits)]
    return [node.tokens + tokens for tokens in longer] or [node.tokens]


def test_longest_chains_of_ten_thousand_graphs() -> None:
    draw = random.Random(0)
    for _ in range(10_000):
        graph = graph_of(draw, draw.randint(1, 7))
        ends = draw.sample(sorted(graph.nodes), draw.randint(1, len(graph.nodes)))
        for waits in (False, True):
            expected = max(tokens for end in ends for tokens in chains(graph, end, waits))
            assert graph.longest(ends, waits=waits) == expected


def test_a_summary_by_hand() -> None:
    graph = CallGraph()
    for name, reads, waits, tokens, finish in [
        ("a", (), (), 10, "stop"),
        ("b", (), (), 30, "stop"),
        ("c", (), (), 5, "cancelled"),
        ("end", ("a",), ("b",), 7, "stop"),
    ]:
        node = graph.add(CallNode(name=name, request=Request(messages=()), reads=reads, waits=waits))
        node.completion = Completion(
            text="", finish=finish, usage=Usage(prompt=100, cached=40, completion=tokens, drafted=3, rejected=1)
        )
        node.end = 9.0 if name == "b" else 1.0
    assert graph.summary(["end"], ["a", "b", "end"]) == {
        "calls": 4,
        "tokens_total": 52,
        "tokens_accepted": 17,
        "tokens_critical": 37,
        "tokens_cancelled": 5,
        "tokens_wasted": 0,
        "tokens_drafted": 12,
        "tokens_rejected": 4,
        "prefill": 400,
        "prefill_cached": 160,
        "estimated": 0,
        "truncated": 0,
        "seconds": 9.0,
    }
    assert graph.ancestors(["end"]) == {"a", "end"}


def test_refused() -> None:
    graph = CallGraph()
    graph.add(CallNode(name="a", request=Request(messages=())))
    with pytest.raises(ArgumentError, match="call a is in the graph already"):
        graph.add(CallNode(name="a", request=Request(messages=())))
    with pytest.raises(ArgumentError, match="call b depends on z"):
        graph.add(CallNode(name="b", request=Request(messages=()), reads=("z",)))


def test_prompts_know_what_they_are_made_of() -> None:
    done = Completion(text="four", source="first#0")
    request = Request(messages=(Message("user", ("Is it ", done.piece, "? Or ", done.piece, "?")),))
    assert request.messages[0].text == "Is it four? Or four?"
    assert request.sources == ("first#0",)
    same = Request(messages=(Message("user", ("Is it four? Or four?",)),))
    assert same.key == request.key  # where text came from changes nothing about the call
    assert Request(messages=same.messages, sample=1).key != same.key
    assert Request(messages=same.messages, path=("x",)).key != same.key
