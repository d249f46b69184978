"""Records how a `lists` model decodes answers one token at a time, and draws from that what students are shown.

Importing this module loads torch. All masks are drawn for each row by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.seeds import derive
from partsong_zoo.lists.model import BOS, CANVAS, EOS, MASK, PAD, answer_text, full_mask, token_ids
from partsong_zoo.lists.tasks import FAMILIES, ListExample, check, draw

__all__ = [
    "MANY_ANSWERS",
    "ODDS",
    "ListTrajectories",
    "corrupted",
    "decode_one_by_one",
    "extended",
    "half_masks",
    "level_masks",
    "sample_trajectories",
    "snapshot_masks",
    "state_masks",
]

#: Tasks with many answers, all of them equally likely.
MANY_ANSWERS = ("shuffle", "insert_random", "remove_random", "replace_random")
#: How often a task is drawn, relative to the others. The model has not learned Latin squares, so there are none.
ODDS = {family: 1.0 for family in FAMILIES if family != "latin"} | {"sort": 2.0, "add": 2.0, "chain": 4.0}
#: Places of a recorded answer and its end: every task but the Latin squares has room in them.
RECORDED = 12


class ListTrajectories(NamedTuple):
    """Holds texts and the order in which their tokens were decided.

    Attributes:
        ids: prompts and answers with their ends, left-aligned, int64 `[texts, length]`.
        canvas: the places of the answers, bool `[texts, length]`.
        order: in which step each place was decided, from 0; -1 outside the canvas.
    """

    ids: Tensor
    canvas: Tensor
    order: Tensor

    def rows(self, which: Tensor) -> ListTrajectories:
        """Returns some of the texts."""
        return ListTrajectories(*(tensor[which] for tensor in self))


def _ranks(order: Tensor, among: Tensor) -> Tensor:
    """Numbers the places of each row by rising order, without gaps; -1 elsewhere."""
    last = torch.iinfo(torch.int64).max
    ranks = order.masked_fill(~among, last).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    return ranks.masked_fill(~among, -1)


@torch.no_grad()
def decode_one_by_one(
    model: LlamaForCausalLM, prompts: Sequence[str], drawn: Tensor, seed: int, *, canvas: int = RECORDED
) -> ListTrajectories:
    """Decodes prompts one token at a time, at the place that the model is most certain of.

    Args:
        model: a `lists` model that fills masks.
        prompts: what is asked.
        drawn: bool `[prompts]`, whose tokens are drawn at temperature 1; the others take the likeliest.
        seed: draws them.
        canvas: places for each answer.

    Returns:
        The texts; what follows an answer's first end of text is more of them.
    """
    rows = [[BOS, *token_ids(prompt)] for prompt in prompts]
    length = max(map(len, rows)) + canvas
    ids = torch.tensor([row + [MASK] * canvas + [PAD] * (length - canvas - len(row)) for row in rows])
    open_, order = ids == MASK, torch.full_like(ids, -1)
    generator, every, mask = torch.Generator().manual_seed(seed), torch.arange(len(rows)), full_mask(ids != PAD)
    for step in range(canvas):
        log_probs = model(ids, attention_mask=mask).logits.float().index_fill(-1, torch.tensor([MASK]), -torch.inf)
        log_probs = log_probs.log_softmax(-1)
        place = log_probs.amax(-1).masked_fill(ids != MASK, -torch.inf).argmax(dim=1)
        here = log_probs[every, place]
        token = torch.where(drawn, torch.multinomial(here.exp(), 1, generator=generator)[:, 0], here.argmax(-1))
        ids[every, place], order[every, place] = token, step
    ended = (open_ & (ids == EOS)).cumsum(1) > 0
    return ListTrajectories(ids.masked_fill(ended & open_, EOS), open_, order)


def draw_examples(num: int, seed: int) -> list[ListExample]:
    """Draws prompts that students are shown; evaluations draw theirs in another way."""
    source = random.Random(derive(seed, "distillation"))
    families = source.choices([*ODDS], [*ODDS.values()], k=num)
    return [draw(family, source) for family in families]


def sample_trajectories(
    model: LlamaForCausalLM, num: int, seed: int, *, collapsed: bool = False, batch: int = 256
) -> ListTrajectories:
    """Records a teacher's answers, and keeps the right ones.

    Where a task has one answer the likeliest tokens are taken. Where it has many they are drawn, so that students learn
    how the teacher's answers are distributed.

    Args:
        model: the teacher.
        num: prompts; fewer texts are kept.
        seed: draws the prompts and tokens.
        collapsed: also takes the likeliest tokens where a task has many answers, as published recipes do. Students then
            see one of them.
        batch: prompts that are decoded together.

    Raises:
        ArgumentError: no answer is right.
    """
    examples = sorted(draw_examples(num, seed), key=lambda example: len(example.prompt.split()))
    parts: list[ListTrajectories] = []
    for start in range(0, num, batch):
        mine = examples[start : start + batch]
        drawn = torch.tensor([example.family in MANY_ANSWERS and not collapsed for example in mine])
        texts = decode_one_by_one(model, [example.prompt for example in mine], drawn, derive(seed, "draws", start))
        right = [
            check(example.prompt, answer_text([token for token, here in zip(row, places, strict=True) if here]))
            for example, row, places in zip(mine, texts.ids.tolist(), texts.canvas.tolist(), strict=True)
        ]
        parts.append(texts.rows(torch.tensor(right).nonzero().flatten()))
    length = max(part.ids.shape[1] for part in parts)
    kept = ListTrajectories(*(torch.cat(tensors) for tensors in zip(*(_padded(p, length) for p in parts), strict=True)))
    if not len(kept.ids):
        raise ArgumentError(f"none of the teacher's {num} answers is right; train it longer, or draw more prompts")
    return kept


def _padded(texts: ListTrajectories, length: int) -> ListTrajectories:
    more = length - texts.ids.shape[1]
    fills = (PAD, False, -1)
    return ListTrajectories(
        *(torch.nn.functional.pad(tensor, (0, more), value=fill) for tensor, fill in zip(texts, fills, strict=True))
    )


def extended(texts: ListTrajectories, places: int) -> ListTrajectories:
    """Makes every canvas `places` long with more ends of text, which are decided when the last one was.

    Args:
        texts: with canvases of one length.
        places: at least as many as they have, and at most 24.

    Raises:
        ArgumentError: the canvases are longer, or the model has no room.
    """
    sizes = texts.canvas.sum(1)
    have = int(sizes[0])
    if not (bool((sizes == have).all()) and have <= places <= CANVAS):
        raise ArgumentError(f"places={places} for canvases of {have}; give {have} to {CANVAS}")
    start = texts.canvas.int().argmax(1, keepdim=True)
    length = int(start.max()) + places
    texts = _padded(texts, max(length, texts.ids.shape[1]))
    place = torch.arange(texts.ids.shape[1])
    canvas = (place >= start) & (place < start + places)
    order = torch.where(canvas & ~texts.canvas, texts.order.gather(1, start + have - 1), texts.order)
    grown = ListTrajectories(texts.ids.masked_fill(canvas & ~texts.canvas, EOS), canvas, _ranks(order, canvas))
    return ListTrajectories(*(tensor[:, :length] for tensor in grown))


# --- what is masked ---------------------------------------------------------------------------------------------------


def _windows(canvas: Tensor, width: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a block of `width` places in each row: what is in it, what follows it, and how many places go before."""
    place = canvas.cumsum(1) - 1
    blocks = (canvas.sum(1) + width - 1) // width
    start = width * (torch.rand(len(canvas), generator=draw) * blocks).long()[:, None]
    inside = canvas & (place >= start) & (place < start + width)
    return inside, canvas & (place >= start + width), start


def half_masks(canvas: Tensor, width: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks a random half of a random block and all that follows it, and then the block's other half (dParallel).

    Args:
        canvas: bool `[batch, length]`.
        width: places of a block; those before it are shown.
        draw: the random generator.

    Returns:
        Two masks, bool `[batch, length]`.
    """
    inside, after, _ = _windows(canvas, width, draw)
    first = torch.rand(canvas.shape, generator=draw) < 0.5
    return (inside & first) | after, (inside & ~first) | after


def snapshot_masks(texts: ListTrajectories, width: int, ratio: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks what the teacher had not decided at a moment of its trajectory (d3LLM), and the complement in the block.

    The moment is when as many tokens were decided as stand before a random block, and a share of ``1 - ratio`` of the
    block. What follows the block is masked in both.

    Args:
        texts: the trajectories.
        width: places of a block.
        ratio: share of the block that is still masked, `[batch]`.
        draw: the random generator.
    """
    inside, after, start = _windows(texts.canvas, width, draw)
    moment = start + ((1 - ratio[:, None]) * inside.sum(1, keepdim=True)).round().long()
    late = texts.order >= moment
    return (inside & late) | after, (inside & ~late) | after


def state_masks(texts: ListTrajectories, decided: Tensor) -> Tensor:
    """Masks what the teacher had not decided after its first `decided` tokens, `[batch]`."""
    return texts.canvas & (texts.order >= decided[:, None])


def level_masks(texts: ListTrajectories, width: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws a level of each trajectory: what is masked when it begins, and the `width` tokens that it decides (T3D)."""
    levels = (texts.canvas.sum(1) + width - 1) // width
    start = width * (torch.rand(len(levels), generator=draw) * levels).long()
    masked = state_masks(texts, start)
    return masked, masked & (texts.order < start[:, None] + width)


def corrupted(texts: ListTrajectories, ratio: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Puts masks at half of some places of an answer and random other tokens at the rest (ReDiff's stage 1).

    Args:
        texts: the trajectories; a place gets a token that occurs somewhere in the batch's answers.
        ratio: share of the canvas that is corrupted, `[batch]`.
        draw: the random generator.

    Returns:
        The tokens, and which places were corrupted.
    """
    shape = texts.ids.shape
    chosen = texts.canvas & (torch.rand(shape, generator=draw) < ratio[:, None])
    known = texts.ids[texts.canvas].unique()
    noise = known[torch.randint(len(known), shape, generator=draw)]
    is_mask = torch.rand(shape, generator=draw) < 0.5
    tokens = torch.where(chosen, torch.where(is_mask, MASK, noise), texts.ids)
    return tokens, chosen & (tokens != texts.ids)
