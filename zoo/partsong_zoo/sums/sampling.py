"""Samples drafts of a `sums` model, many at once, by transformers' own `generate`. Loads torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.seeds import derive
from partsong_zoo.chat_model import CONTEXT, EOS, MODEL, PAD, USER, Words
from partsong_zoo.sums.model import WORDS
from partsong_zoo.sums.problems import FAMILIES
from partsong_zoo.sums.solutions import draw
from partsong_zoo.sums.training import Attempts

__all__ = ["Draft", "draft_pool", "sample"]

#: The longest right solution has 68 tokens; a longer draft has lost its way.
MOST_TOKENS = 88


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds what a model wrote.

    Attributes:
        text: the answer.
        finished: whether it ended before the tokens ran out.
        read: how many tokens the prompt has.
        written: how many tokens the answer has, including its end.
    """

    text: str
    finished: bool
    read: int
    written: int


@torch.no_grad()
def sample(
    model: LlamaForCausalLM,
    prompts: Sequence[str],
    *,
    seed: int | None = 0,
    most: int = MOST_TOKENS,
    batch: int = 512,
    words: Words = WORDS,
) -> list[Draft]:
    """Samples one draft per prompt.

    Args:
        model: a `sums` model.
        prompts: what the user writes.
        seed: draws tokens at temperature 1; None takes the likeliest ones.
        most: how many tokens a draft may have.
        batch: how many prompts run at a time. Sampled drafts are a function of seed, prompts and batch.
        words: the language of another model.

    Returns:
        The drafts, in the order of the prompts.

    Raises:
        ArgumentError: (a ValueError) a prompt and its draft do not fit into the model's context.
    """
    rows = [[USER, *words.encode(prompt), MODEL] for prompt in prompts]
    if (longest := max(map(len, rows), default=0)) + most > CONTEXT:
        raise ArgumentError(f"a prompt of {longest} tokens and {most} to write do not fit into {CONTEXT}")
    # Rows of similar length side by side waste no padding.
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    drafts: dict[int, Draft] = {}
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        written = _generate(
            model, [rows[index] for index in some], most, None if seed is None else derive(seed, start), words
        )
        drafts.update(zip(some, written, strict=True))
    return [drafts[index] for index in range(len(rows))]


def _generate(model: Any, rows: list[list[int]], most: int, seed: int | None, words: Words) -> list[Draft]:
    length = max(map(len, rows))
    ids = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
    options: dict[str, Any] = {"do_sample": False} if seed is None else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed % 2**63)
        out = model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=most, **options)
    drafts: list[Draft] = []
    for row, written in zip(rows, out[:, length:].tolist(), strict=True):
        finished = EOS in written
        count = written.index(EOS) + 1 if finished else len(written)
        drafts.append(Draft(words.decode(written[:count]), finished, len(row), count))
    return drafts


def draft_pool(model: LlamaForCausalLM, num: int, drafts: int, *, seed: int = 0) -> list[Attempts]:
    """Draws problems that training may show, the families in turn, and samples a model's drafts of them.

    Args:
        model: a `sums` model.
        num: how many problems there are.
        drafts: how many drafts each problem gets; unfinished ones are left out.
        seed: draws problems and drafts.

    Returns:
        The problems with at least one draft.
    """
    chosen = [
        draw(FAMILIES[index % len(FAMILIES)], random.Random(derive(seed, "sums pool", index)), fresh=False)
        for index in range(num)
    ]
    samples = sample(model, [example.question for example in chosen for _ in range(drafts)], seed=seed)
    pool: list[Attempts] = []
    for index, example in enumerate(chosen):
        ended = tuple(one.text for one in samples[index * drafts : (index + 1) * drafts] if one.finished)
        if ended:
            pool.append(Attempts(example.question, example.solution, ended))
    return pool
