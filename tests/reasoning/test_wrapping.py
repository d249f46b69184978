"""Engines around an engine: bounds over many runs, and chats before prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Line, Message, Parameters, Request, Run, self_consistency
from partsong.reasoning.answers.extract import final_number
from partsong.reasoning.calls.engine_wrappers import BoundedEngine, ChatEngine
from tests.reasoning.counting import Counting


def counting() -> Counting:
    return Counting(lambda request, draw: Line(text=f"so {draw.randrange(5)}"))


def vote(engine: Any, questions: int) -> list[str | None]:
    async def main() -> list[str | None]:
        runs = [Run(engine, seed=seed) for seed in range(questions)]
        asked = (self_consistency(run, "3 + 4?", extract=final_number, num=4, early_stop=False) for run in runs)
        return [answer.answer for answer in await asyncio.gather(*asked)]

    return asyncio.run(main())


def test_runs_are_bounded_together_and_answer_the_same_in_one_loop_after_another() -> None:
    inner = counting()
    bounded = BoundedEngine(inner, 3)
    assert bounded.name == inner.name
    plain = vote(counting(), 6)
    assert vote(bounded, 6) == plain == vote(bounded, 6)
    assert inner.most == 3 and len(inner.asked) == 48
    asyncio.run(bounded.close())
    assert inner.closed == 1


def test_who_waits_and_is_cancelled_leaves_its_place() -> None:
    async def main() -> tuple[int, int]:
        inner = counting()
        bounded = BoundedEngine(inner, 1)
        tasks = [asyncio.ensure_future(bounded.generate(Request(messages=(), seed=k))) for k in range(4)]
        await asyncio.sleep(0)
        for task in tasks[:3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(inner.asked), inner.under_way

    assert asyncio.run(main()) == (2, 0)


@pytest.mark.parametrize("bound", [0, -1, True, 2.0])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    with pytest.raises(ArgumentError, match="positive integer"):
        BoundedEngine(counting(), bound)


def test_a_chat_stands_before_every_prompt_and_nothing_else_changes() -> None:
    inner = counting()
    before = [Message("system", ("Be brief.",)), Message("user", ("1 + 1?",)), Message("assistant", ("2",))]
    asked = Request(messages=(Message("user", ("3 + 4?",)),), parameters=Parameters(max_tokens=7), path=("a",), seed=5)
    asyncio.run(ChatEngine(inner, before).generate(asked))
    (inner_request,) = inner.asked
    assert inner_request.messages == (*before, *asked.messages)
    assert (inner_request.parameters, inner_request.path, inner_request.sample, inner_request.seed) == (
        asked.parameters,
        asked.path,
        asked.sample,
        asked.seed,
    )
