"""Samples texts of language models, of the zoo and others, for heads that guess ahead to learn. Loads torch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.prompt import prompt_ids
from partsong.seeds import derive
from partsong_zoo.lists import tasks as lists_tasks
from partsong_zoo.sums.problems import FAMILIES as SUMS_FAMILIES
from partsong_zoo.sums.solutions import draw as draw_sums
from partsong_zoo.sums.training import first_row, invent, later_row

__all__ = ["PROMPTS", "SampledTexts", "prompts_of", "sample_texts"]

#: One in this many texts takes the likeliest tokens; the others are drawn at temperature 1.
_GREEDY_EVERY = 4


class SampledTexts(NamedTuple):
    """Holds texts that a model has written.

    Attributes:
        ids: prompt and answer of each, int64 `[texts, length]`, with zeros at the end.
        starts: where the answers begin, int64 `[texts]`.
        lengths: how many tokens the texts have, int64 `[texts]`.
    """

    ids: Tensor
    starts: Tensor
    lengths: Tensor


def _lists_prompt(rng: random.Random, fresh: bool) -> str:
    return lists_tasks.draw(rng.choice(lists_tasks.FAMILIES), rng).prompt


def _sums_prompt(rng: random.Random, fresh: bool) -> str:
    if fresh:
        return draw_sums(rng.choice(SUMS_FAMILIES), rng, fresh=True).question
    if rng.random() < 0.8:
        return first_row(rng, "countdown" if rng.random() < 0.6 else "sum", failed=0.25).prompt
    return later_row(rng, [invent(rng)], rng.choice(("again", "listed", "distil")), 2).prompt


#: Draws a prompt for each model; the second argument asks for one that training has not seen, where possible.
PROMPTS: Mapping[str, Callable[[random.Random, bool], str]] = MappingProxyType(
    {"lists-ar": _lists_prompt, "sums": _sums_prompt}
)


def prompts_of(name: str, num: int, *, seed: int = 0, fresh: bool = False) -> list[str]:
    """Draws prompts of the kinds that a model of the zoo has learned.

    Args:
        name: a key of `PROMPTS`.
        num: how many.
        seed: draws them.
        fresh: whether they are to measure by, not to train on.

    Raises:
        ArgumentError: (a ValueError) the prompts of this model are not known.

    >>> [prompt[-1] for prompt in prompts_of("lists-ar", 2)]
    ['=', '=']
    """
    if name not in PROMPTS:
        raise ArgumentError(f"no prompts are known for {name!r}, only for {', '.join(PROMPTS)}: give a file of prompts")
    kind = "fresh" if fresh else "training"
    return [PROMPTS[name](random.Random(derive(seed, "head", kind, index)), fresh) for index in range(num)]


def sample_texts(engine: LocalEngine, prompts: Sequence[str], *, seed: int = 0, max_tokens: int = 128) -> SampledTexts:
    """Lets a model answer prompts, most at temperature 1, and closes its engine. Answers that do not end are left out.

    Args:
        engine: the engine.
        prompts: what the user writes.
        seed: the seed of all draws.
        max_tokens: how many tokens an answer may have.

    Raises:
        ArgumentError: no answer has ended.
    """
    requests = [
        Request(
            messages=(Message("user", (prompt,)),),
            parameters=Parameters(max_tokens=max_tokens, temperature=0.0 if index % _GREEDY_EVERY == 0 else 1.0),
            seed=derive(seed, "text", index),
        )
        for index, prompt in enumerate(prompts)
    ]
    answers = asyncio.run(_answers(engine, requests))
    end = engine.tokenizer.eos_token_id
    assert isinstance(end, int)
    pairs = [
        (prompt_ids(engine.tokenizer, asked.messages), [*(answer.tokens or ()), end])
        for asked, answer in zip(requests, answers, strict=True)
        if answer.finish == "stop"
    ]
    if not pairs:
        raise ArgumentError(f"none of {len(prompts)} answers has ended within {max_tokens} tokens: raise max_tokens")
    texts = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    return SampledTexts(
        torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
        torch.tensor([len(prompt) for prompt, _ in pairs]),
        torch.tensor([len(text) for text in texts]),
    )


async def _answers(engine: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    try:
        return await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
