"""The shipped `products` model: a stock folder that forks, joins, is mostly right, and computes nothing twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from partsong import zoo
from partsong.reasoning import Answer, Parameters, Run
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.threads import FORMATS, encoded
from partsong.reasoning.threads.layout import TokenRun
from partsong_zoo import products
from partsong_zoo.products import check, examples, in_threads, work_out
from partsong_zoo.products.model import EOS
from partsong_zoo.products.training import speech_of
from partsong_zoo.training.rollouts import drawn_parts, has_forked
from partsong_zoo.training.thread_batch import pack_threads
from partsong_zoo.training.thread_training import log_likelihoods

FORM = FORMATS["multiverse"]
NUM = 45
#: Measured on 1,008 problems: see benchmarks; the bound lies well below.
LEAST_RIGHT = 0.9


def ask(questions: list[str], dtype: torch.dtype = torch.float32, **asked: Any) -> list[tuple[Run, Answer]]:
    async def main() -> list[tuple[Run, Answer]]:
        engine = LocalEngine("products", dtype=dtype)
        parameters = Parameters(**{"max_tokens": 256, "temperature": 0, **asked})

        async def one(number: int, question: str) -> tuple[Run, Answer]:
            run = Run(engine, seed=number)
            options: dict[str, Any] = {"format": "multiverse", "teach": False, "max_depth": 1}
            return run, await fork_join(run, question, extract=products.answer_of, parameters=parameters, **options)

        try:
            return list(await asyncio.gather(*(one(n, q) for n, q in enumerate(questions))))
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def problems() -> list[products.Problem]:
    return examples(NUM, seed=21)


@pytest.fixture(scope="module")
def answered(problems: list[products.Problem]) -> list[tuple[Run, Answer]]:
    return ask([problem.question for problem in problems])


def test_the_folder_is_stock_and_small() -> None:
    row = zoo.MODELS["products"]
    assert (row.kind, row.task) == ("text", products)
    assert sum(path.stat().st_size for path in row.folder.iterdir()) < 4_000_000
    model: Any = AutoModelForCausalLM.from_pretrained(row.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(row.folder)
    assert type(model) is LlamaForCausalLM and {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS


def test_it_forks_is_mostly_right_and_computes_nothing_twice(
    problems: list[products.Problem], answered: list[tuple[Run, Answer]]
) -> None:
    right = sum(
        one.answer is not None and check(problem.question, one.answer)
        for problem, (_, one) in zip(problems, answered, strict=True)
    )
    assert right / NUM >= LEAST_RIGHT
    for problem, (_, one) in zip(problems, answered, strict=True):
        assert one.details["threads"] == [len(str(problem.numbers[1]))] and has_forked(one)
        assert one.details["tokens_repeated"] == 0


def test_its_longest_chain_is_much_shorter_than_all_it_writes(answered: list[tuple[Run, Answer]]) -> None:
    total, critical = (sum(one.summary[name] for _, one in answered) for name in ("tokens_total", "tokens_critical"))
    assert total / critical >= 1.3


def test_a_right_text_is_the_one_it_was_taught(
    problems: list[products.Problem], answered: list[tuple[Run, Answer]]
) -> None:
    """The runtime gives what training showed, token by token: tags, threads and what follows."""
    speech, same = speech_of(AutoTokenizer.from_pretrained(zoo.MODELS["products"].folder)), 0
    for problem, (run, one) in zip(problems, answered, strict=True):
        taught = encoded(in_threads(work_out(problem), FORM), speech.encode)
        drawn = encoded(drawn_parts(run, one, FORM, EOS), speech.encode)
        same += _flat(drawn) == [*_flat(taught), EOS]
    assert same / NUM >= LEAST_RIGHT - 0.1


def _flat(tree: Any) -> list[int]:
    return [
        token
        for part in tree
        for token in (part.tokens if isinstance(part, TokenRun) else [t for one in part.threads for t in _flat(one)])
    ]


def test_training_gives_what_was_drawn_the_probabilities_it_was_drawn_with() -> None:
    """Samples at temperature 1: the engine's log-probabilities, token by token, are those of one packed forward."""
    questions = [problem.question for problem in examples(6, seed=5)]
    pair = zoo.load("products", dtype=torch.float64)
    model: Any = pair.model
    model.set_attn_implementation("sdpa")
    speech, texts, expected = speech_of(pair.tokenizer), [], []
    for question, (run, one) in zip(questions, ask(questions, torch.float64, temperature=1.0, logprobs=1), strict=True):
        parts = encoded(drawn_parts(run, one, FORM, EOS), speech.encode)
        texts.append((TokenRun(tuple(speech.prompt(question))), *parts))
        calls = [node.completion for node in run.graph.nodes.values()]
        expected.append(sum(sum(call.logprobs or ()) for call in calls if call is not None))
    batch = pack_threads(texts, length=400)
    with torch.no_grad():
        found = log_likelihoods(model, batch)
    of = batch.texts[batch.learn]
    assert [float(found[of == number].sum()) for number in range(len(texts))] == pytest.approx(expected, abs=1e-5)
