"""Calls that are cancelled, engines that are closed, models that fail: nobody waits for ever, others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from partsong.reasoning import Completion, EngineError, Run, self_consistency
from partsong.reasoning.local import LocalEngine
from tests.reasoning.local_models import all_of, engine, request, run

PROMPT = "the quick brown fox jumps over"


def test_a_cancelled_call_leaves_at_the_next_step_and_the_others_go_on_as_before() -> None:
    requests = [request(PROMPT, seed=seed, max_tokens=60) for seed in range(4)]
    alone = run(all_of(engine(end_tokens=()), requests))

    async def main() -> tuple[list[Any], int]:
        local = engine(end_tokens=())
        written: dict[int, int] = {}
        tasks: list[asyncio.Task[Completion]] = []

        def progressed(text: str, tokens: int, confidence: Sequence[float] = (), **more: bool) -> None:
            written[0] = tokens
            if tokens == 5:
                tasks[0].cancel()

        tasks += [
            asyncio.ensure_future(local.generate(each, progressed if index == 0 else None))
            for index, each in enumerate(requests)
        ]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        rows = len(local._worker._scheduler.tickets)
        await local.close()
        assert rows == 0
        return list(found), written[0]

    found, written = run(main())
    assert isinstance(found[0], asyncio.CancelledError)
    assert written < 60
    assert found[1:] == alone[1:]


def test_calls_that_wait_can_be_cancelled_too() -> None:
    async def main() -> tuple[list[Any], int]:
        local = engine(max_rows=1, end_tokens=())
        tasks = [
            asyncio.ensure_future(local.generate(request(PROMPT + "abc"[index], max_tokens=20))) for index in range(3)
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        kept = local._worker._scheduler.tree.tokens
        await local.close()
        return list(found), kept

    found, kept = run(main())
    assert [type(each) for each in found] == [Completion, asyncio.CancelledError, Completion]
    # The prompt of the cancelled call was never computed, so no keys of it are there.
    assert kept == len(PROMPT) + 2 * (1 + 19)


def test_the_loop_is_free_while_the_model_computes() -> None:
    async def main() -> tuple[int, bool]:
        local = engine()
        gate, inside = threading.Event(), threading.Event()
        plain = local.model.forward

        def forward(*arguments: Any) -> Tensor:
            inside.set()
            assert gate.wait(60)
            return plain(*arguments)

        local.model.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        task = asyncio.ensure_future(local.generate(request(PROMPT)))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(inside.wait, 60)
        turns = 0
        for _ in range(100):
            await asyncio.sleep(0)
            turns += 1
        waiting = not task.done()
        gate.set()
        await task
        await local.close()
        return turns, waiting

    assert run(main()) == (100, True)


def test_a_model_that_fails_ends_all_calls_with_a_reason_and_can_go_on() -> None:
    async def main() -> tuple[list[Any], Completion, Completion]:
        local = engine()
        good = await local.generate(request(PROMPT, seed=1))
        plain, calls, is_broken = local.model.forward, 0, True

        def forward(*arguments: Any) -> Tensor:
            nonlocal calls
            calls += 1
            # From the third forward on: the second call may come when the first has failed already.
            if is_broken and calls >= 3:
                raise MemoryError("no room")
            return plain(*arguments)

        local.model.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        asked = [local.generate(request(PROMPT + "ab"[index], max_tokens=50)) for index in range(2)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        is_broken = False
        again = await local.generate(request(PROMPT, seed=1))
        await local.close()
        return list(failed), good, again

    failed, good, again = run(main())
    for error in failed:
        assert isinstance(error, EngineError) and isinstance(error.__cause__, MemoryError) and "no room" in str(error)
    assert again.text == good.text


def test_closing_ends_calls_under_way_and_refuses_new_ones() -> None:
    async def main() -> LocalEngine:
        local = engine(end_tokens=())
        begun = asyncio.Event()
        task = asyncio.ensure_future(
            local.generate(request(PROMPT, max_tokens=60), lambda text, tokens, confidence=(), **more: begun.set())
        )
        await begun.wait()
        await local.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await local.generate(request(PROMPT))
        await local.close()
        return local

    local = run(main())
    assert not local._worker._thread.is_alive()


def test_the_thread_ends_with_the_engine() -> None:
    local = engine()
    thread = local._worker._thread
    del local
    thread.join(60)
    assert not thread.is_alive()


def test_a_strategy_runs_on_it_and_its_ledger_counts_every_token() -> None:
    async def main() -> tuple[Any, Run]:
        local = engine(max_rows=4)
        told = Run(local, seed=3)
        answer = await self_consistency(told, PROMPT, extract=lambda text: text[:1] or None, num=6, early_stop=False)
        await local.close()
        return answer, told

    answer, told = run(main())
    completions = [node.completion for node in told.graph.nodes.values() if node.completion is not None]
    assert len(completions) == 6 and answer.answer in {each.text[:1] for each in completions}
    assert all(each.usage.reported and each.usage.completion > 0 for each in completions)
    # Six samples, one prompt computed.
    assert sum(each.usage.prompt - each.usage.cached for each in completions) == len(PROMPT)
