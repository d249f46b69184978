"""`LocalEngine` and hogwild with a model that computes no numbers after one letter: only calls that read it fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from partsong.kernels.speculation.draft import DraftTree
from partsong.reasoning import Completion, EngineError, Request, Run, final_number
from partsong.reasoning.hogwild.strategy import hogwild
from partsong.reasoning.local import LocalEngine
from tests.reasoning.drafters import FREE, Guessing
from tests.reasoning.hogwild_twin import SHORT
from tests.reasoning.local_models import engine, llama, request, run, tokenizer

PROMPTS = ("abcabcabc", "the quick brown fox", "the quick zebra", "a", "zz")


def broken(letter: str = "z", **more: Any) -> LlamaForCausalLM:
    module = llama(**more)
    with torch.no_grad():
        module.get_input_embeddings().weight[tokenizer()(letter).input_ids[0]] = torch.nan
    return module


async def ends(local: LocalEngine, requests: list[Request]) -> list[Any]:
    return await asyncio.gather(*map(local.generate, requests), return_exceptions=True)


def asked(length: int, temperature: float) -> list[Request]:
    # Lengths differ, so that rows leave before and after the broken ones and take their places.
    return [
        request(prompt, seed=n, max_tokens=length + 3 * n, temperature=temperature) for n, prompt in enumerate(PROMPTS)
    ]


def no_z(tokens: list[int], room: int) -> DraftTree:
    return DraftTree.chain(tokenizer()("zz").input_ids[:room])


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "few rows": {"max_rows": 2, "prefill_chunk": 5},
    "drafts": {"speculate": Guessing(guess=no_z), "step_costs": FREE},
}


@pytest.mark.parametrize(
    ("how", "temperature"),
    [  # by default temperatures take turns
        pytest.param(how, temperature, id=f"{name}-{temperature}", marks=[pytest.mark.full] * ((row + column) % 2))
        for row, (name, how) in enumerate(HOW.items())
        for column, temperature in enumerate([0.0, 0.8])
    ],
)
def test_one_call_fails_and_the_others_go_on(how: dict[str, Any], temperature: float) -> None:
    model = broken()

    async def main() -> list[Any]:
        local = engine(model, **how)
        try:
            # Twice, since the second calls find keys, and places in memory, that the first have left.
            return [await ends(local, asked(length, temperature)) for length in (9, 12)]
        finally:
            await local.close()

    async def alone(one: Request) -> Any:
        local = engine(model)
        try:
            return (await ends(local, [one]))[0]
        finally:
            await local.close()

    for length, got in zip((9, 12), run(main()), strict=True):
        for one, end in zip(asked(length, temperature), got, strict=True):
            expected = run(alone(one))
            if isinstance(expected, Completion):
                assert (end.text, end.finish) == (expected.text, expected.finish)
            else:
                assert isinstance(end, EngineError) and str(end) == str(expected)
                assert str(end).startswith("no token for position ")
                assert "NaN" in str(end)
        where = [str(end).split(":")[0] for end in got if isinstance(end, Exception)]
        assert f"no token for position {len(PROMPTS[2])}" in where
        assert f"no token for position {len(PROMPTS[4])}" in where
        assert any(isinstance(end, Completion) for end in got)


def test_workers_that_read_each_other_all_fail() -> None:
    async def main() -> None:
        local = engine(broken(max_position_embeddings=2048))
        try:
            await hogwild(Run(local, seed=1), "zebra", extract=final_number, prompts=SHORT)
        finally:
            await local.close()

    with pytest.raises(EngineError, match=r"no token for position \d+ of row \d"):
        run(main())
