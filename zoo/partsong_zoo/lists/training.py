"""Draws batches for the `lists` models and computes their two losses. Importing this module loads torch.

The diffusion loss is that of LLaDA (arXiv:2502.09992), but the number of masks is drawn instead of their rate. k of an
answer's K places are masked, with k uniform in 1 ... K, and the cross-entropy at the masked places counts K / k times.
In the mean over k and places this is the same bound on the answer's log-likelihood.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from partsong_zoo.lists.model import BOS, CANVAS, EOS, MASK, PAD, full_mask, token_ids
from partsong_zoo.lists.tasks import FAMILIES, draw

#: How often training sees a task, relative to the others. At first all of them have to get going ...
_EARLY = {"reverse": 1.5, "sort": 1.5, "add": 2.0, "chain": 2.0}
#: ... later it sees less of what is learned quickly, and more of even choices and of answers that rest on many places.
_LATE = {
    **dict.fromkeys(("copy", "insert_at", "remove_at", "replace_at"), 0.5),
    **{"reverse": 1.5, "sort": 0.7, "shuffle": 1.2, "insert_random": 3.0, "remove_random": 2.0, "replace_random": 2.0},
    **{"latin": 1.5, "add": 1.0, "chain": 2.0},
}


@dataclass(frozen=True, slots=True)
class ListsBatch:
    """Holds prompts and answers, left-aligned, with padding at the end.

    Attributes:
        ids: Token ids, `[batch, length]`.
        canvas: Which tokens belong to the answer, including its ends of text, bool `[batch, length]`.
        valid: Which tokens are not padding, bool `[batch, length]`.
    """

    ids: Tensor
    canvas: Tensor
    valid: Tensor


def draw_batch(rng: np.random.Generator, num: int, *, fill: bool, late: bool = False) -> ListsBatch:
    """Draws `num` examples as training sees them.

    Args:
        rng: Where the draws come from.
        num: How many rows.
        fill: Whether more ends of text follow the answer and its end, to fill a canvas of random length.
        late: Whether most examples are of the tasks that take long to learn.

    Returns:
        The batch.
    """
    source = random.Random(int(rng.integers(2**62)))
    # Most canvases are short, which is cheaper; a third of the batches teach the long ones.
    longest = CANVAS if source.random() < 0.34 else 12
    odds, rows, starts = _LATE if late else _EARLY, [], []
    for family in source.choices(FAMILIES, [odds.get(family, 1.0) for family in FAMILIES], k=num):
        example = draw(family, source)
        prompt, answer = [BOS, *token_ids(example.prompt)], [*token_ids(example.answer), EOS]
        extra = source.randint(0, max(0, longest - len(answer))) if fill else 0
        rows.append([*prompt, *answer, *[EOS] * extra])
        starts.append(len(prompt))
    length = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    place, ends = torch.arange(length), torch.tensor([len(row) for row in rows])
    valid = place < ends[:, None]
    return ListsBatch(ids, valid & (place >= torch.tensor(starts)[:, None]), valid)


def draw_masks(canvas: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draws which tokens of each canvas are masked, bool `[batch, length]`, and their weights, float `[batch]`.

    The numbers of masks are spread evenly over the batch, which makes the loss less noisy and leaves its mean the same.
    """
    sizes = canvas.sum(dim=1)
    spread = (torch.from_numpy(rng.permutation(len(sizes))) + torch.from_numpy(rng.random(len(sizes)))) / len(sizes)
    num = 1 + (spread * sizes).long().clamp(max=sizes - 1)
    order = torch.from_numpy(rng.random(canvas.shape)).masked_fill(~canvas, 2.0).argsort(dim=1).argsort(dim=1)
    return order < num[:, None], sizes / num


def diffusion_loss(model: LlamaForCausalLM, batch: ListsBatch, rng: np.random.Generator) -> Tensor:
    """Computes the bound on the answers' negative log-likelihood, in nats per example.

    Args:
        model: A Llama; it is given the mask by which every token sees all others.
        batch: What it learns.
        rng: Draws the masks.

    Returns:
        A scalar.
    """
    masked, counts = draw_masks(batch.canvas, rng)
    noisy = batch.ids.masked_fill(masked, MASK)
    hidden = model.model(input_ids=noisy, attention_mask=full_mask(batch.valid), use_cache=False).last_hidden_state
    losses = F.cross_entropy(model.lm_head(hidden[masked]).float(), batch.ids[masked], reduction="none")
    weights = counts[:, None].expand_as(masked)[masked].to(losses)
    return (weights * losses).sum() / len(masked)


def causal_loss(model: LlamaForCausalLM, batch: ListsBatch) -> Tensor:
    """Computes the answers' negative log-likelihood, in nats per example; the prompt is only read.

    Args:
        model: A Llama.
        batch: What it learns.

    Returns:
        A scalar.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    learned = batch.canvas[:, 1:]
    logits = model.lm_head(hidden[:, :-1][learned]).float()
    return F.cross_entropy(logits, batch.ids[:, 1:][learned], reduction="sum") / len(learned)
