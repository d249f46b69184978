"""What a run adds to the engine's own work, with a thousand calls at the same time."""

from __future__ import annotations

import asyncio
import time

from partsong.reasoning import Budget, Line, Message, Run, ScriptedEngine

ASK = [Message("user", ("what is it",))]
#: Calls at once, and reports of progress each: 128 tokens, 16 at a time.
CALLS, TOKENS = 1000, 128


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request, draw: Line(text="1", tokens=TOKENS), seconds_per_token=1e-6)


async def through_a_run() -> float:
    """Seconds of the processor for all calls, with a budget that every report is checked against."""
    run = Run(engine(), concurrency=CALLS, budget=Budget(tokens=10**9))
    start = time.process_time()
    async with run.samples(ASK, CALLS, path=("s",)) as samples:
        lengths = [completion.usage.completion async for _, completion in samples]
    spent = time.process_time() - start
    assert lengths == [TOKENS] * CALLS and run.spending.tokens == TOKENS * CALLS
    return spent


async def without_a_run() -> float:
    """The same requests, asked of the engine directly, by as many tasks."""
    run = Run(engine(), concurrency=CALLS)
    async with run.samples(ASK, CALLS, path=("s",)) as samples:
        async for _ in samples:
            pass
    requests = [node.request for node in run.graph.nodes.values()]
    other, reports = engine(), 0

    def progress(text: str, tokens: int, confidence: object = ()) -> None:
        nonlocal reports
        reports += 1

    start = time.process_time()
    await asyncio.gather(*(other.generate(request, progress) for request in requests))
    spent = time.process_time() - start
    assert reports == CALLS * TOKENS // 16
    return spent


def overhead() -> float:
    """Seconds per call, the better of two, since others may use this machine."""
    return (min(asyncio.run(through_a_run()) for _ in range(2)) - asyncio.run(without_a_run())) / CALLS


def test_a_thousand_streams_at_once_cost_less_than_a_millisecond_each() -> None:
    assert overhead() < 1e-3
