"""The shipped `sums` model: a stock folder, right often enough, and better when it thinks with many calls."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from partsong import zoo
from partsong.reasoning import Message, Parameters, Run
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies import pdr, self_consistency, sequential_refinement
from partsong_zoo import sums
from partsong_zoo.sums import answer_of, check, examples
from partsong_zoo.sums.model import EOS, encode
from partsong_zoo.sums.prompts import MOST_ATTEMPTS, PDR, REFINEMENT, distil, tally
from partsong_zoo.sums.sampling import Draft, sample
from partsong_zoo.sums.scoring import answer, random_k, vote
from partsong_zoo.sums.scoring import pdr as plain_pdr

LIMITS = Parameters(max_tokens=96)
#: Problems that are asked in this file; the drafts are made once.
NUM = 32


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return zoo.load("sums").model


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return [example.question for example in examples(NUM, 11, ["countdown"])]


@pytest.fixture(scope="module")
def drafts(model: LlamaForCausalLM, questions: list[str]) -> list[list[Draft]]:
    made = sample(model, [question for question in questions for _ in range(8)], seed=1)
    return [made[8 * place : 8 * place + 8] for place in range(len(questions))]


def test_the_folder_is_stock_and_small() -> None:
    row = zoo.MODELS["sums"]
    assert (row.kind, row.task) == ("text", sums)
    assert sum(path.stat().st_size for path in row.folder.iterdir()) < 10_000_000
    model: Any = AutoModelForCausalLM.from_pretrained(row.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(row.folder)
    assert type(model) is LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS
    for example in examples(20, seed=3):
        assert tokenizer(example.question).input_ids == encode(example.question)
        assert tokenizer.decode(encode(example.solution)) == example.solution


@pytest.mark.full
def test_votes_and_rounds_beat_a_single_draft(
    model: LlamaForCausalLM, questions: list[str], drafts: list[list[Draft]]
) -> None:
    """Measured on 300 problems: 20, 59 and 50 per cent; the bounds lie well below."""
    every = [check(q, one.text) for q, made in zip(questions, drafts, strict=True) for one in made]
    single = sum(every) / len(every)
    voted = sum((said := vote(made)) is not None and check(q, said) for q, made in zip(questions, drafts, strict=True))
    refined = plain_pdr(model, questions, drafts, (4, 1), random_k(MOST_ATTEMPTS), seed=2).right
    assert single >= 0.1
    assert voted / NUM >= single + 0.15
    assert refined / NUM >= single + 0.1


@pytest.mark.full
def test_who_says_yes_is_mostly_right(questions: list[str], drafts: list[list[Draft]]) -> None:
    said = [(q, one) for q, made in zip(questions, drafts, strict=True) for one in made if answer(one) is not None]
    assert len(said) >= 50
    assert sum(check(q, one.text) for q, one in said) / len(said) >= 0.6
    gave_up = [one for made in drafts for one in made if answer(one) is None and one.finished]
    assert sum(": no. " in one.text for one in gave_up) / len(gave_up) >= 0.9


@pytest.mark.full
def test_it_lists_what_attempts_have_found(
    model: LlamaForCausalLM, questions: list[str], drafts: list[list[Draft]]
) -> None:
    """Of countdowns it names the first success, or none; of sums results that drafts have, if not always in order."""
    cases = [(q, [one.text for one in made[:3]]) for q, made in zip(questions, drafts, strict=True)]
    made = sample(model, [distil(*case) for case in cases], seed=None)
    assert sum(draft.text == tally(*case) for draft, case in zip(made, cases, strict=True)) >= 0.8 * NUM
    sums_asked = [example.question for example in examples(NUM, 11, ["sum"])]
    tried = sample(model, [question for question in sums_asked for _ in range(2)], seed=1)
    pairs = [(q, [one.text for one in tried[2 * at : 2 * at + 2]]) for at, q in enumerate(sums_asked)]
    named = sample(model, [distil(*pair) for pair in pairs], seed=None)
    found = [set(re.findall(r"-?\d+", draft.text)) for draft in named]
    asked = [set(re.findall(r"-?\d+", tally(*pair))) for pair in pairs]
    assert sum(bool(one) and one <= those for one, those in zip(found, asked, strict=True)) >= 0.8 * NUM


def test_the_library_thinks_with_it(questions: list[str]) -> None:
    """The real strategies over the real engine, the chat template and the prompts the model has learned."""

    async def ask(engine: LocalEngine, number: int, question: str) -> dict[str, str | None]:
        chat, run = [Message("user", (question,))], Run(engine, seed=number)
        one = await run.call(chat, path=("one",), parameters=LIMITS)
        options: Any = {"extract": answer_of, "parameters": LIMITS}
        rounds: Any = {"prompts": PDR, "distillation": "random-k", "keep": MOST_ATTEMPTS, **options}
        voted, drafted, refined = await asyncio.gather(
            self_consistency(run, question, num=8, **options),
            pdr(Run(engine, seed=number), question, **rounds),
            sequential_refinement(Run(engine, seed=number), question, prompts=REFINEMENT, **options),
        )
        return {"one": answer_of(one.text), "vote": voted.answer, "pdr": drafted.answer, "refine": refined.answer}

    async def ask_all() -> list[dict[str, str | None]]:
        """Asks all at once: the engine batches what waits."""
        engine = LocalEngine("sums")
        try:
            return await asyncio.gather(*(ask(engine, number, one) for number, one in enumerate(questions[:6])))
        finally:
            await engine.close()

    found = asyncio.run(ask_all())
    right = {
        name: sum((said := one[name]) is not None and check(q, said) for q, one in zip(questions, found, strict=False))
        for name in found[0]
    }
    assert right["vote"] > right["one"], right
    assert right["pdr"] >= right["one"] and right["refine"] >= right["one"], right
