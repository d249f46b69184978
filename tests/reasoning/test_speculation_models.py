"""Drafters that are models: they draw with the text's own noise, and refuse what they cannot read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw, draw, likely_draws
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.assistant import Assistant
from partsong.reasoning.local.speculation.masked import Masked
from tests.reasoning.drafters import FREE
from tests.reasoning.local_models import all_of, engine, llama, request, run, tokenizer

LISTS = ("sort : dog ant cat =", "copy : hen fox owl pig =", "reverse : cat bee dog =", "sort : pig owl ant bee =")


@pytest.mark.parametrize("how", [(0.0, 1.0), (0.7, 0.9), (1.0, 1.0), (1.5, 0.6)])
def test_the_first_of_likely_draws_is_the_draw(how: tuple[float, float]) -> None:
    logits = torch.randn(400, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    draws = [TokenDraw(*how, seed=7, place=place) for place in range(len(logits))]
    several = likely_draws(logits, draws, 5)
    assert all(len(set(tokens)) == 5 for tokens in several)
    agree = sum(tokens[0] == token for tokens, token in zip(several, draw(logits, draws), strict=True))
    # Tokens more than eight below the likeliest one are left out: together they win about once in a few hundred.
    assert agree >= len(logits) - 8


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_the_model_itself_guesses_all_its_own_draws(settings: dict[str, Any]) -> None:
    asked = [request(text, seed=seed, max_tokens=20, **settings) for seed, text in enumerate(("abcab", "zz top", "q"))]
    own = Assistant(model=llama(), cost=0.0, length=5)
    plain = run(all_of(engine(), asked))
    answers: list[Completion] = run(all_of(engine(speculate=own, step_costs=FREE), asked))
    assert [answer.text for answer in answers] == [answer.text for answer in plain]
    for answer in answers:
        # Only what lies behind the end of an answer is thrown away.
        assert answer.usage.rejected <= (5 if answer.finish == "stop" else 0)
        assert answer.usage.drafted - answer.usage.rejected >= (answer.usage.completion - 2) * 5 // 6


def test_drafts_end_where_the_second_models_context_does() -> None:
    short = llama(max_position_embeddings=48)
    asked = request("abcdefgh" * 5, max_tokens=30, temperature=0.0)
    local = engine(speculate=Assistant(model=short, cost=0.0), step_costs=FREE, end_tokens=())
    (answer,) = run(all_of(local, [asked]))
    assert answer.text == run(all_of(engine(end_tokens=()), [asked]))[0].text
    assert answer.usage.completion == 30 and 0 < answer.usage.drafted < 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_model_drafts_for_its_causal_relative(temperature: float) -> None:
    parameters = Parameters(max_tokens=12, temperature=temperature)
    asked = [
        Request(messages=(Message("user", (text,)),), parameters=parameters, seed=seed)
        for seed, text in enumerate(LISTS)
    ]

    def answers(**more: Any) -> list[Completion]:
        return run(all_of(LocalEngine("lists-ar", dtype=torch.float64, **more), asked))

    plain, fast = answers(), answers(speculate=Masked(length=4))
    assert [each.text for each in fast] == [each.text for each in plain]
    drafted, rejected = (sum(getattr(each.usage, name) for each in fast) for name in ("drafted", "rejected"))
    assert drafted - rejected >= 8


@pytest.mark.parametrize(("model", "texts"), [("lists-ar", LISTS), ("sums", ("make 64 from 3 7 25 6", "17+5+30"))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_heads_guess_ahead_of_their_models(model: str, texts: tuple[str, ...], temperature: float) -> None:
    parameters = Parameters(max_tokens=40, temperature=temperature)
    asked = [
        Request(messages=(Message("user", (text,)),), parameters=parameters, seed=seed)
        for seed, text in enumerate(texts)
    ]

    def answers(**more: Any) -> list[Completion]:
        return run(all_of(LocalEngine(model, dtype=torch.float64, **more), asked))

    plain, fast = answers(), answers(speculate="head")
    assert [each.text for each in fast] == [each.text for each in plain]
    drafted, rejected = (sum(getattr(each.usage, name) for each in fast) for name in ("drafted", "rejected"))
    assert drafted - rejected >= sum(each.usage.completion for each in fast) // 3


def test_a_drafter_that_reads_other_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"lists-ar cannot draft .* its vocabulary has 58 tokens"):
        engine(speculate="assistant:model=lists-ar")
    with pytest.raises(UnsupportedError, match='names no mask_token_id with partsong_adapter "mdlm"'):
        LocalEngine("lists-ar", speculate="masked:model=lists-ar")
    with pytest.raises(ArgumentError, match="drafter assistant needs model"):
        LocalEngine("lists-ar", speculate="assistant")
    with pytest.raises(ArgumentError, match="mesh='3'; this option has no text form"):
        LocalEngine("lists-ar", speculate="assistant:model=lists-ar,mesh=3")
    with pytest.raises(ArgumentError, match="not-there"):
        LocalEngine("lists-ar", speculate="assistant:model=not-there")
    with pytest.raises(UnsupportedError, match="they differ, for example at"):
        LocalEngine(llama(), tokenizer=tokenizer(), speculate=Assistant(model="sums"))
