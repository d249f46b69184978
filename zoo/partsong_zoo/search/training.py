"""Makes batches of direct answers or of searches, and computes their loss. Importing this module loads torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong_zoo.chat_model import EOS, MODEL, PAD, USER
from partsong_zoo.search.model import LANGUAGES
from partsong_zoo.search.problems import TASKS
from partsong_zoo.sums.training import SumsBatch, loss_of

__all__ = ["Way", "draw_batches", "mean_loss"]

#: What the model writes: an answer, or a search that leads to one.
Way = Literal["direct", "search"]


def draw_batches(task: str, rng: random.Random, way: Way, tokens: int, parts: int = 4) -> list[SumsBatch]:
    """Draws problems until their texts have enough tokens; both ways train on as many tokens a step.

    Args:
        task: one of `TASKS`.
        rng: where the draws come from.
        way: what is learned.
        tokens: how many tokens the texts have, padding not counted.
        parts: how many batches they become. Texts of similar length stand together, which wastes little padding.
    """
    rows: list[tuple[list[int], int]] = []
    total, words = 0, LANGUAGES[task]
    while total < tokens:
        one = TASKS[task].draw(rng, fresh=False)
        prompt = [USER, *words.encode(one.question), MODEL]
        rows.append(([*prompt, *words.encode(one.direct if way == "direct" else one.search), EOS], len(prompt)))
        total += len(rows[-1][0])
    rows.sort(key=lambda row: len(row[0]))
    cuts = [len(rows) * part // parts for part in range(parts + 1)]
    return [_pack(rows[low:high]) for low, high in itertools.pairwise(cuts) if low < high]


def _pack(rows: Sequence[tuple[list[int], int]]) -> SumsBatch:
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in rows])
    learned = [[begin <= place < len(ids) for place in range(length)] for ids, begin in rows]
    return SumsBatch(ids, torch.tensor(learned))


def mean_loss(model: LlamaForCausalLM, batches: Sequence[SumsBatch]) -> Tensor:
    """Computes the mean negative log-likelihood of the learned tokens of all batches, in nats."""
    counts = [int(batch.learned.sum()) for batch in batches]
    losses = [count * loss_of(model, batch) for count, batch in zip(counts, batches, strict=True)]
    return torch.stack(losses).sum() / sum(counts)
