"""`LocalEngine` with drafters: whoever guesses, everything but the time is as without them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels.speculation.jacobi import Jacobi
from partsong.kernels.speculation.ngram import Ngram
from partsong.reasoning import Completion, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.assistant import Assistant
from partsong.reasoning.local.speculation.head import TrainedHead
from tests.reasoning.drafters import FREE, Guessing, at_random, knowing, unruly
from tests.reasoning.heads import head_folder
from tests.reasoning.local_models import LETTERS, all_of, engine, llama, reference, request, run, text_of, tokenizer

VOCABULARY = len(LETTERS) + 2
PROMPTS = ("abcabcabcabc", "the quick brown fox jumps over a lazy dog", "the quick brown fox jumps high.", "zz")
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0})


def mixed(num: int = 24) -> list[Request]:
    return [
        request(PROMPTS[number % 4], seed=number // 4, max_tokens=1 + 7 * number % 23, **SETTINGS[number % 3])
        for number in range(num)
    ]


def whole_texts(requests: list[Request]) -> list[list[int]]:
    """Prompt and answer of each request, written in the plainest way."""
    model = llama()
    return [[*tokenizer()(each.messages[0].text).input_ids, *reference(model, each)[0]] for each in requests]


@functools.cache
def mixed_texts() -> list[list[int]]:
    return whole_texts(mixed())


def always_right() -> Guessing:
    return knowing(mixed_texts())


def always_wrong() -> Guessing:
    return knowing(mixed_texts(), lambda token: (token + 1) % VOCABULARY)


DRAFTERS: dict[str, Callable[[], Any]] = {
    "ngram": lambda: "ngram",
    "jacobi": lambda: "jacobi",
    "two": lambda: [Ngram(num=2, length=5), Jacobi(window=5)],
    "random": lambda: at_random(VOCABULARY),
    "right": always_right,
    "wrong": always_wrong,
    "assistant": lambda: Assistant(model=llama(), cost=0.0),
    "assistant, tree": lambda: Assistant(model=llama(seed=3), cost=0.0, branches=3, length=4),
    "head": lambda: TrainedHead(path=head_folder()),
    "head, tree": lambda: TrainedHead(path=head_folder(num_masks=4, rank=0, seed=5), length=3, branches=2),
    "all": lambda: ["ngram", "jacobi", at_random(VOCABULARY), always_right(), TrainedHead(path=head_folder())],
}


#: Every drafter with the engine that has least room, and one with the one that has most.
PAIRS = [
    pytest.param(drafter, how, marks=() if how or drafter == "ngram" else pytest.mark.full)
    for how in ({"max_rows": 3, "prefill_chunk": 7, "cache_mb": 0.02}, {})
    for drafter in DRAFTERS
]


@pytest.mark.parametrize(("drafter", "how"), PAIRS, ids=str)
def test_answers_are_those_of_plain_decoding(drafter: str, how: dict[str, Any]) -> None:
    requests = mixed()
    # The tokenizer has one token for every letter.
    plain = [text[len(each.messages[0].text) :] for each, text in zip(requests, mixed_texts(), strict=True)]
    order = random.Random(1).sample(range(len(requests)), len(requests))
    local = engine(speculate=DRAFTERS[drafter](), step_costs=FREE, **how)
    answers: list[Completion] = run(all_of(local, [requests[index] for index in order]))
    assert [answer.text for answer in answers] == [text_of(plain[index]) for index in order]
    assert [answer.usage.completion for answer in answers] == [len(plain[index]) for index in order]
    drafted, rejected = (sum(getattr(answer.usage, name) for answer in answers) for name in ("drafted", "rejected"))
    assert drafted > 0
    assert rejected == drafted if drafter == "wrong" else rejected <= drafted
    # Two samples of a prompt may begin alike, and the one that is known first is guessed for both.
    assert drafter != "right" or rejected < drafted / 4


@pytest.mark.parametrize("kind", ["deep", "chances", "no tokens"])
def test_a_drafter_that_heeds_nothing_changes_nothing(kind: str) -> None:
    asked = [request(prompt, seed=5, max_tokens=7, temperature=0.7) for prompt in PROMPTS]
    longer = whole_texts([request(prompt, seed=5, max_tokens=22, temperature=0.7) for prompt in PROMPTS])
    plain = run(all_of(engine(), asked))
    fast = run(all_of(engine(speculate=unruly(longer, kind), step_costs=FREE), asked))
    assert [(one.text, one.usage.completion) for one in fast] == [(one.text, one.usage.completion) for one in plain]
    assert sum(one.usage.drafted - one.usage.rejected for one in fast) > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "nucleus", "warm"])
def test_right_guesses_take_a_step_for_each_seven_tokens(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(PROMPTS[1], seed=5, max_tokens=22, **settings)
    steps = list[int]()
    local = engine(speculate=knowing(whole_texts([asked])), step_costs=FREE)
    forward = local.model.forward

    def counted(tokens: Any, *more: Any) -> Any:
        steps.append(len(tokens))
        return forward(tokens, *more)

    monkeypatch.setattr(local.model, "forward", counted)
    (answer,) = run(all_of(local, [asked]))
    length = answer.usage.completion
    # One step reads the prompt and draws a token; each further one verifies six guesses and draws one more.
    assert len(steps) == 1 + -(-(length - 1) // 7)
    assert answer.usage.drafted > 0 and answer.usage.rejected == 0


def test_logprobs_progress_and_stop_strings_are_as_without_drafts() -> None:
    plain_text = run(all_of(engine(), [request(PROMPTS[0], seed=3, max_tokens=24, temperature=0.0)]))[0].text
    stop = (plain_text[7:10],)
    asked = [
        request(PROMPTS[0], seed=3, max_tokens=24, temperature=0.0, stop=stop, logprobs=3),
        request(PROMPTS[1], seed=4, max_tokens=24, temperature=0.9, logprobs=2),
    ]

    def heard_from(**more: Any) -> tuple[list[Completion], list[tuple[str, int]]]:
        heard = list[tuple[str, int]]()

        def hear(text: str, tokens: int, confidence: Sequence[float] = (), *, restart: bool = False) -> None:
            heard.append((text, tokens))

        async def main() -> list[Completion]:
            local = engine(**more)
            answers = [await local.generate(each, hear) for each in asked]
            await local.close()
            return answers

        return run(main()), heard

    plain, told_plain = heard_from()
    fast, told_fast = heard_from(speculate=knowing(whole_texts(asked)), step_costs=FREE)
    assert sum(each.usage.drafted for each in fast) > 10
    for one, other in zip(plain, fast, strict=True):
        assert (one.text, one.finish, one.tokens) == (other.text, other.finish, other.tokens)
        assert one.usage.completion == other.usage.completion
        assert one.logprobs is not None and other.logprobs is not None
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-10)
    assert told_plain == told_fast


def test_an_answer_that_is_gone_on_from_keeps_its_keys() -> None:
    """Keys of rejected guesses lie between those of kept ones until they are moved: later prompts read them."""

    async def both(local: LocalEngine) -> list[str]:
        first = await local.generate(request(PROMPTS[0], max_tokens=20, temperature=0.0))
        second = await local.generate(request(PROMPTS[0] + first.text, max_tokens=20, temperature=0.0))
        cached = second.usage.cached
        await local.close()
        assert cached > len(PROMPTS[0])
        return [first.text, second.text]

    assert run(both(engine(speculate=at_random(VOCABULARY, 30), step_costs=FREE))) == run(both(engine()))


def test_drafters_see_every_step_and_forget_every_text() -> None:
    drafter = at_random(VOCABULARY)
    requests = mixed(6)
    answers = run(all_of(engine(speculate=drafter, step_costs=FREE), requests))
    assert len(drafter.forgotten) == sum(answer.usage.completion > 1 for answer in answers)
    for tokens, seen in drafter.seen:
        assert tuple(tokens[-len(seen.match.tokens) :]) == seen.match.tokens
        assert len(seen.match.drawn) == 1 + len(seen.draft)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (
            "nrgam",
            ArgumentError,
            r"no drafter 'nrgam'; did you mean ngram\? The drafters are ngram, jacobi, published, assistant, saguaro",
        ),
        ("ngram:size=3", ArgumentError, "drafter ngram has no option 'size'; its options are num, length"),
        (Ngram(length=0), ArgumentError, "Ngram: length=0; use a positive integer"),
        ([7], ArgumentTypeError, "found int"),
    ],
)
def test_drafters_that_mean_nothing_are_refused(asked: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        engine(speculate=asked)


@pytest.mark.parametrize("costs", [{}, {2: 1.0}, {1: 1.0, 4: 0.0}])
def test_costs_that_mean_nothing_are_refused(costs: dict[int, float]) -> None:
    with pytest.raises(ArgumentError, match="that of 1 token among them"):
        engine(speculate="ngram", step_costs=costs)
