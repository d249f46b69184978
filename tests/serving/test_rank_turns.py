"""Texts whose tokens are decided in any order, over ranks: the steps of the first one, and a served model's texts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.parallel import Mesh
from partsong.parallel.ranks.launch import launch
from partsong.serving.texts.events import TextDone, TextRequest
from partsong.serving.texts.local import LocalText
from partsong.serving.texts.rank_turns import RankTurns
from partsong.serving.texts.step_turns import StepTurns
from partsong.serving.texts.wire import TextSpec
from tests.parallel.ranks import gathered


def _counted(ranks: int) -> list[tuple[str, int]]:
    """Steps of three texts on this rank; the first rank cancels one and meets an error in another."""
    seen: list[tuple[str, int]] = []

    def counting(name: str, last: int) -> Any:
        for number in range(last):
            seen.append((name, number))
            yield number
        if name == "fails":
            raise ValueError(name)
        return name

    async def on_first(turns: StepTurns) -> list[Any]:
        asked = [("short", 2), ("fails", 1), ("long", 99)]
        tasks = [asyncio.ensure_future(turns.run(counting(*each), [].append, each)) for each in asked]
        ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
        tasks[2].cancel()
        await asyncio.wait(tasks)
        return ended

    with Mesh(data=ranks) as mesh:
        shared = RankTurns(mesh)
        if mesh.is_main:
            turns = StepTurns(shared)
            value, error = asyncio.run(on_first(turns))
            turns.close()
            assert value == "short" and isinstance(error, ValueError)
        else:
            shared.follow(lambda begins: counting(*begins))
        first, second = gathered(seen)
        assert first == second
    return first


def test_ranks_take_the_steps_of_the_first_one() -> None:
    seen = launch(_counted, 2, 2)
    assert {("short", 0), ("short", 1), ("fails", 0)} <= set(seen)
    assert ("long", 98) not in seen


@pytest.mark.full
@pytest.mark.slow
def test_ranks_share_a_model_that_decides_in_any_order() -> None:
    """Two texts at once and one that is cancelled, as one process writes them."""
    prompts = ("sort : dog ant cat =", "reverse : dog ant cat owl pig =")
    asks = [TextRequest(messages=(("user", prompt),), seed=3, temperature=0.5, block_size=2) for prompt in prompts]

    async def last(text: LocalText, ask: TextRequest) -> TextDone:
        *_, end = [event async for event in text.run(ask)]
        assert isinstance(end, TextDone)
        return end

    async def written(**how: Any) -> list[TextDone]:
        text = LocalText(TextSpec(name="lists", model="lists-mdlm", dtype="float64", **how))
        await text.start()
        try:
            async with aclosing(text.run(asks[0])) as cancelled:
                await anext(cancelled)
            return await asyncio.gather(*(last(text, ask) for ask in asks))
        finally:
            await text.close()

    shared = asyncio.run(written(nproc=2))
    assert shared == asyncio.run(written())
    assert [end.text for end in shared] == ["ant cat dog", "pig owl cat ant dog"]
    with pytest.raises(ArgumentError, match="model lists: Ring does not run on a language model"):
        asyncio.run(written(nproc=2, share="ring"))
