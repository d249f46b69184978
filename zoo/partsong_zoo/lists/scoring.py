"""Measures the quality of a `lists` model: decodes answers one token at a time, in the plainest way, and checks them.

This is the slow twin of faster decoders: no cache, every forward over the whole row. Importing this module loads torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong.knobs import Whole, check_knobs, type_hints
from partsong_zoo.lists.model import BOS, CANVAS, MASK, PAD, answer_text, full_mask, token_ids
from partsong_zoo.lists.tasks import FAMILIES, check, examples, support

#: How many places an answer may take: as many as the models have learned.
Canvas = Annotated[int, Whole(1, CANVAS)]

__all__ = ["accuracy", "answers", "total_variation"]


@torch.no_grad()
def answers(
    model: LlamaForCausalLM, prompts: Sequence[str], *, canvas: Canvas = CANVAS, seed: int | None = None
) -> list[str]:
    """Decodes prompts in one batch, one token of each per step.

    A masked diffusion model fills the place it is most certain of, which is chosen before its token is drawn. A causal
    model fills the next place.

    Args:
        model: A `lists` model, whose kind its configuration names.
        prompts: What is asked.
        canvas: Places for each answer and its end of text, at most 24.
        seed: Draws tokens from the model's probabilities; None takes the likeliest ones.

    Returns:
        The words before the first end of text, per prompt.

    Raises:
        ArgumentError: (a ValueError) If the model has not learned a canvas of this length.
    """
    check_knobs(type_hints(answers), {"canvas": canvas})
    rows = [[BOS, *token_ids(prompt)] for prompt in prompts]
    length = max(map(len, rows)) + canvas
    ids = torch.tensor([row + [MASK] * canvas + [PAD] * (length - canvas - len(row)) for row in rows])
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    diffusion = getattr(model.config, "partsong_adapter", None) == "mdlm"
    first = torch.tensor([len(row) for row in rows])
    for step in range(canvas):
        if diffusion:
            logits = model(ids, attention_mask=full_mask(ids != PAD)).logits.float()
            certainty = logits.log_softmax(-1).amax(-1).masked_fill(ids != MASK, -math.inf)
            place = read = certainty.argmax(dim=1)
        else:
            place, read = first + step, first + step - 1
            logits = model(ids[:, : int(place.max())]).logits.float()
        every = torch.arange(len(rows))
        ids[every, place] = _pick(logits[every, read], generator)
    return [answer_text(row[len(start) : len(start) + canvas]) for row, start in zip(ids.tolist(), rows, strict=True)]


def _pick(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Picks a token per row of logits `[batch, vocabulary]`."""
    if generator is None:
        return logits.argmax(dim=-1)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def accuracy(
    model: LlamaForCausalLM,
    num: int = 200,
    *,
    seed: int = 1,
    families: Sequence[str] = FAMILIES,
    canvas: Canvas = CANVAS,
    sampled: bool = False,
) -> dict[str, float]:
    """Measures the fraction of valid answers per task.

    Args:
        model: A `lists` model.
        num: Prompts per task.
        seed: Draws the prompts; training draws its own in another way.
        families: The tasks.
        canvas: Places for each answer.
        sampled: Whether tokens are drawn from the model's probabilities; otherwise the likeliest ones are taken.

    Returns:
        Fractions by task.
    """
    fractions: dict[str, float] = {}
    for family in families:
        prompts = [example.prompt for example in examples(num, seed, [family])]
        texts = answers(model, prompts, canvas=canvas, seed=seed if sampled else None)
        fractions[family] = sum(map(check, prompts, texts)) / num
    return fractions


def total_variation(model: LlamaForCausalLM, prompt: str, num: int = 1000, *, canvas: int = 12, seed: int = 0) -> float:
    """Sums half the absolute differences between the frequencies of sampled answers and the true, even ones.

    Sampling alone makes this about `sqrt(answers / (2 pi num))`, also for a perfect model.

    Args:
        model: A `lists` model.
        prompt: What is asked.
        num: Answers drawn.
        canvas: Places for each answer.
        seed: Draws them.

    Returns:
        A number from 0 to 1; invalid answers count in full.
    """
    truth = support(prompt)
    seen = Counter(answers(model, [prompt] * num, canvas=canvas, seed=seed))
    inside = sum(abs(seen.pop(text, 0) / num - 1 / len(truth)) for text in truth)
    return 0.5 * (inside + sum(seen.values()) / num)
