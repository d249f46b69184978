"""Drafts of a `sums` model, many at once, by transformers' own `generate`. Importing this module loads torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.seeds import derive
from partsong.zoo.sums.model import CONTEXT, EOS, MODEL, PAD, USER, decode, encode
from partsong.zoo.sums.problems import FAMILIES
from partsong.zoo.sums.solutions import draw
from partsong.zoo.sums.training import Attempts

__all__ = ["Draft", "draft_pool", "sample"]

#: The longest right solution has 68 tokens; whoever needs more has lost the thread.
MOST_TOKENS = 88


@dataclass(frozen=True, slots=True)
class Draft:
    """What a model wrote.

    Attributes:
        text: the answer.
        finished: it came to its end before the tokens ran out.
        read: tokens of the prompt.
        written: tokens of the answer, its end included.
    """

    text: str
    finished: bool
    read: int
    written: int


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: Sequence[str], *, seed: int | None = 0, most: int = MOST_TOKENS, batch: int = 512
) -> list[Draft]:
    """One draft per prompt.

    Args:
        model: a `sums` model.
        prompts: what the user says.
        seed: draws tokens at temperature 1; None takes the likeliest ones.
        most: tokens per draft.
        batch: prompts at a time. Sampled drafts are a function of seed, prompts and batch.

    Returns:
        The drafts, in the order of the prompts.

    Raises:
        ArgumentError: (a ValueError) a prompt and its draft do not fit into the model's context.
    """
    rows = [[USER, *encode(prompt), MODEL] for prompt in prompts]
    if (longest := max(map(len, rows), default=0)) + most > CONTEXT:
        raise ArgumentError(f"a prompt of {longest} tokens and {most} to write do not fit into {CONTEXT}")
    # Rows of like length side by side waste no padding.
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    found: dict[int, Draft] = {}
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        made = _generate(model, [rows[index] for index in some], most, None if seed is None else derive(seed, start))
        found.update(zip(some, made, strict=True))
    return [found[index] for index in range(len(rows))]


def _generate(model: Any, rows: list[list[int]], most: int, seed: int | None) -> list[Draft]:
    length = max(map(len, rows))
    ids = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
    options: dict[str, Any] = {"do_sample": False} if seed is None else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed % 2**63)
        made = model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=most, **options)
    drafts: list[Draft] = []
    for row, written in zip(rows, made[:, length:].tolist(), strict=True):
        finished = EOS in written
        count = written.index(EOS) + 1 if finished else len(written)
        drafts.append(Draft(decode(written[:count]), finished, len(row), count))
    return drafts


def draft_pool(model: LlamaForCausalLM, num: int, drafts: int, *, seed: int = 0) -> list[Attempts]:
    """Problems that training may show, the families in turn, and a model's drafts of them.

    Args:
        model: a `sums` model.
        num: problems.
        drafts: per problem; those that came to no end are left out.
        seed: draws problems and drafts.

    Returns:
        The problems with at least one draft.
    """
    chosen = [
        draw(FAMILIES[index % len(FAMILIES)], random.Random(derive(seed, "sums pool", index)), fresh=False)
        for index in range(num)
    ]
    made = sample(model, [example.question for example in chosen for _ in range(drafts)], seed=seed)
    pool: list[Attempts] = []
    for index, example in enumerate(chosen):
        ended = tuple(one.text for one in made[index * drafts : (index + 1) * drafts] if one.finished)
        if ended:
            pool.append(Attempts(example.question, example.solution, ended))
    return pool
