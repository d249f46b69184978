"""`LocalEngine` against the plain loop: the same tokens whatever shares the batch, and each token computed once."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.reasoning import Completion, Request
from partsong.reasoning.local import LocalEngine
from tests.reasoning.local_models import (
    CONTEXT,
    EOS,
    all_of,
    engine,
    llama,
    reference,
    request,
    run,
    text_of,
    tokenizer,
)

PROMPT = "the quick brown fox jumps over a lazy dog"
PROMPTS = (PROMPT, "the quick brown fox jumps high.", "a: b", "zz", PROMPT + " twice")


def mixed() -> list[Request]:
    """Greedy and sampled, equal and different prompts, short and long."""
    asked: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.7}, {"temperature": 0.6}]
    return [
        request(PROMPTS[number % 5], seed=number // 5, max_tokens=3 + 5 * number % 17, **asked[number % 4])
        for number in range(14)
    ]


def expected(requests: Sequence[Request]) -> list[str]:
    model = llama()
    return [text_of(reference(model, each)[0]) for each in requests]


@functools.cache
def mixed_answers() -> list[str]:
    return expected(mixed())


def texts(found: Sequence[Completion]) -> list[str]:
    return [each.text for each in found]


@pytest.mark.parametrize(
    "how",
    [{}, {"max_rows": 3}, {"prefill_chunk": 7}, {"cache_mb": 0}, {"cache_mb": 0.02, "max_rows": 2}],
    ids=["all at once", "three rows", "prompts in chunks", "nothing kept", "little kept"],
)
def test_answers_are_those_of_the_plain_loop_in_any_company(how: dict[str, Any]) -> None:
    requests, plain = mixed(), mixed_answers()
    assert len(set(plain)) > 8
    order = random.Random(0).sample(range(len(requests)), len(requests))
    found = run(all_of(engine(**how), [requests[index] for index in order]))
    assert texts(found) == [plain[index] for index in order]


def test_calls_that_come_one_by_one_while_others_run_change_nothing() -> None:
    requests = mixed()

    async def main() -> list[str]:
        local, tasks = engine(), list[asyncio.Task[Completion]]()
        begun = asyncio.Event()
        for each in requests:
            tasks.append(
                asyncio.ensure_future(local.generate(each, lambda text, tokens, confidence=(), **more: begun.set()))
            )
            # The next one comes once this one has written something.
            await begun.wait()
            begun.clear()
        found = await asyncio.gather(*tasks)
        await local.close()
        return texts(found)

    assert run(main()) == expected(requests)


def counted(local: LocalEngine) -> list[int]:
    """Tokens of every forward from now on."""
    sizes: list[int] = []
    plain = local.model.forward

    def forward(tokens: Sequence[int], *rest: Any) -> Tensor:
        sizes.append(len(tokens))
        return plain(tokens, *rest)

    local.model.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    return sizes


def test_samples_of_a_prompt_share_its_keys() -> None:
    local = engine(end_tokens=())
    sizes = counted(local)
    found = run(all_of(local, [request(PROMPT, seed=seed, max_tokens=5) for seed in range(8)]))
    # The first token comes out of the prompt; four more are fed per row.
    assert sum(sizes) == len(PROMPT) + 8 * 4
    assert sum(each.usage.prompt - each.usage.cached for each in found) == len(PROMPT)
    assert sorted(each.usage.cached for each in found) == [0] + 7 * [len(PROMPT)]


def free_of_ends(num: int) -> int:
    """A seed whose answer has letters only, so that its text has as many tokens as were drawn."""
    model = llama()
    asked = (request(PROMPT, seed=seed, max_tokens=num) for seed in range(99))
    return next(each.seed for each in asked if min(reference(model, each)[0]) > EOS)


def test_prompts_share_what_they_begin_with_and_answers_are_gone_on_from() -> None:
    seed = free_of_ends(24)

    async def main() -> tuple[Completion, Completion, Completion, Completion, list[int]]:
        local = engine()
        sizes = counted(local)
        first = await local.generate(request(PROMPT, seed=seed, max_tokens=24))
        other = await local.generate(request(PROMPT[:30] + ".", max_tokens=1))
        more = await local.generate(request(PROMPT + first.text + " so", max_tokens=4))
        again = await local.generate(request(PROMPT[:25], max_tokens=2))
        await local.close()
        return first, other, more, again, sizes

    first, other, more, again, sizes = run(main())
    assert (first.usage.cached, other.usage.cached) == (0, 30)
    # The last token of an answer is drawn and never fed.
    assert more.usage.cached == len(PROMPT) + 23
    # All keys of this one are there, but not what comes behind it: one token is fed again.
    assert (again.usage.cached, again.usage.prompt) == (24, 25)
    # 24 steps of the first call; of the others, the new tokens of the prompt and then one token a step.
    steps = [1] * (more.usage.completion - 1)
    assert sizes[24:] == [1, 4, *steps, 1, *[1] * (again.usage.completion - 1)]
    model = llama()
    assert more.text == text_of(reference(model, request(PROMPT + first.text + " so", max_tokens=4))[0])
    assert again.text == text_of(reference(model, request(PROMPT[:25], max_tokens=2))[0])


def test_usage_counts_what_was_drawn_and_finish_says_why_it_ended() -> None:
    model = llama()
    requests = [request(text, seed=seed, max_tokens=20) for seed in range(4) for text in PROMPTS[:3]]
    plain = [reference(model, each)[0] for each in requests]
    found = run(all_of(engine(model), requests))
    assert [each.usage.completion for each in found] == [len(ids) for ids in plain]
    assert [each.finish for each in found] == ["stop" if EOS in ids else "length" for ids in plain]
    assert {each.finish for each in found} == {"stop", "length"}
    assert [each.usage.prompt for each in found] == [
        len(tokenizer()(each.messages[0].text).input_ids) for each in requests
    ]
    assert all(each.usage.reported for each in found)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_and_confidence_are_the_models_own(temperature: float) -> None:
    model, asked = llama(), request(PROMPT, seed=3, logprobs=4, temperature=temperature, top_p=0.9)
    ids, logits = reference(model, asked)
    chances = torch.stack(logits).log_softmax(-1)
    found = run(all_of(engine(model), [asked, request(PROMPT, seed=4)]))
    assert found[0].logprobs == pytest.approx([float(row[token]) for row, token in zip(chances, ids, strict=True)])
    assert found[0].confidence == pytest.approx((-chances.topk(4).values.mean(-1)).tolist())
    assert found[1].logprobs is None and found[1].confidence is None


def test_progress_tells_the_confidence_of_new_tokens() -> None:
    told: list[float] = []

    async def main() -> tuple[Completion, Completion]:
        local = engine()
        asked = request(PROMPT, seed=3, logprobs=2)
        first = await local.generate(asked, lambda text, tokens, confidence=(), **more: told.extend(confidence))
        silent = request(PROMPT, seed=3)
        second = await local.generate(silent, lambda text, tokens, confidence=(), **more: told.extend(confidence))
        await local.close()
        return first, second

    first, second = run(main())
    assert tuple(told) == first.confidence and first.text == second.text


def test_stop_strings_end_an_answer_and_progress_tells_it_as_it_grows() -> None:
    seed = free_of_ends(20)
    whole = text_of(reference(llama(), request(PROMPT, seed=seed, max_tokens=20))[0])
    stop = whole[11:13]
    told: list[tuple[str, int]] = []

    async def main() -> Completion:
        local = engine()
        asked = request(PROMPT, seed=seed, max_tokens=30, stop=(stop, "never there"))
        found = await local.generate(asked, lambda text, tokens, confidence=(), **more: told.append((text, tokens)))
        await local.close()
        return found

    found = run(main())
    assert found.text == whole[: whole.index(stop)] and found.finish == "stop"
    assert found.usage.completion == whole.index(stop) + 2
    assert "".join(text for text, _ in told) == found.text
    assert [tokens for _, tokens in told] == list(range(1, found.usage.completion + 1))


def test_an_answer_ends_where_the_context_does() -> None:
    prompt = "abcdefgh" * 11
    found = run(all_of(engine(end_tokens=()), [request(prompt, max_tokens=500)]))[0]
    assert found.usage.completion == CONTEXT - len(prompt) and found.finish == "length"


def test_a_prompt_that_fills_the_context_is_refused_before_any_work() -> None:
    async def main() -> list[int]:
        local = engine()
        sizes = counted(local)
        with pytest.raises(ArgumentError, match=f"{CONTEXT} tokens and the model's context {CONTEXT}"):
            await local.generate(request("a" * CONTEXT))
        await local.close()
        return sizes

    assert run(main()) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"stop": ("",)}, "stop="),
        ({"stop": "end"}, "stop="),
        ({"logprobs": 1000}, "logprobs=1000"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        run(all_of(engine(), [request("a", **asked)]))


@pytest.mark.parametrize("asked", [{"max_rows": 0}, {"prefill_chunk": True}, {"cache_mb": -1}, {"pack": True}])
def test_settings_that_mean_nothing_are_refused(asked: dict[str, Any]) -> None:
    # Float64 weights cannot be packed.
    with pytest.raises(ArgumentError, match=next(iter(asked))):
        engine(**asked)
