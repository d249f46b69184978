"""Samples several answers to each prompt from a `lists` model that decides many tokens per forward, for reinforcement.

Every forward of an answer is kept as a slice: what the model read, and the tokens that it decided. A policy gradient of
the slices is that of the sampler itself. Importing this module loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from partsong_zoo.lists.model import BOS, EOS, MASK, PAD, answer_text, full_mask, token_ids
from partsong_zoo.lists.tasks import check
from partsong_zoo.lists.trajectories import RECORDED

__all__ = ["ListRollouts", "log_probs_of", "roll_out_lists"]


class ListRollouts(NamedTuple):
    """Holds sampled answers and the forwards that decided them.

    Attributes:
        right: whether an answer is valid, bool `[prompts, answers]`.
        speed: tokens of the answer and its end, per forward, `[prompts, answers]`.
        states: what each forward read, int64 `[slices, length]`.
        tokens: the same with what was decided, int64 `[slices, length]`.
        decided: where, bool `[slices, length]`.
        answer: for each slice the number of its answer, int64 `[slices]`; answers to one prompt follow each other.
    """

    right: Tensor
    speed: Tensor
    states: Tensor
    tokens: Tensor
    decided: Tensor
    answer: Tensor


@torch.no_grad()
def roll_out_lists(
    model: LlamaForCausalLM,
    prompts: Sequence[str],
    num: int,
    draw: torch.Generator,
    *,
    threshold: float = 0.5,
    canvas: int = RECORDED,
) -> ListRollouts:
    """Samples `num` answers to each prompt at temperature 1.

    A forward decides every place whose entropy is at most `threshold` nats, and always the one of the lowest. Tokens
    are drawn after the places are chosen.

    Args:
        model: a `lists` model that fills masks.
        prompts: what is asked.
        num: answers to each.
        draw: the random generator.
        threshold: in nats.
        canvas: places for each answer and its end.
    """
    rows = [[BOS, *token_ids(prompt)] for prompt in prompts for _ in range(num)]
    length = max(map(len, rows)) + canvas
    ids = torch.tensor([row + [MASK] * canvas + [PAD] * (length - canvas - len(row)) for row in rows])
    answers, forwards = ids == MASK, torch.zeros(len(rows))
    alive, slices = torch.arange(len(rows)), list[tuple[Tensor, ...]]()
    while len(alive):
        state = ids[alive]
        decided, tokens = _decide(model, state, threshold, draw)
        ids[alive] = torch.where(decided, tokens, state)
        slices.append((state, ids[alive], decided, alive))
        forwards[alive] += 1
        alive = alive[~_is_ended(ids[alive], answers[alive])]
    texts = [row[len(start) : len(start) + canvas] for row, start in zip(ids.tolist(), rows, strict=True)]
    sizes = torch.tensor([text.index(EOS) + 1 if EOS in text else canvas for text in texts])
    asked = [prompt for prompt in prompts for _ in range(num)]
    right = torch.tensor([check(prompt, answer_text(text)) for prompt, text in zip(asked, texts, strict=True)])
    shape = (len(prompts), num)
    return ListRollouts(
        right.view(shape), (sizes / forwards).view(shape), *(torch.cat(parts) for parts in zip(*slices, strict=True))
    )


def _decide(model: LlamaForCausalLM, state: Tensor, threshold: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Chooses the places that one forward decides, bool `[rows, length]`, and draws a token for every place."""
    log_probs = _log_probs(model, state)
    probs = log_probs.exp()
    entropy = (-probs * log_probs.clamp(min=-1e4)).sum(-1).masked_fill(state != MASK, torch.inf)
    lowest = entropy == entropy.amin(1, keepdim=True)
    decided = (state == MASK) & ((entropy <= threshold) | lowest)
    tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=draw).view_as(state)
    return decided, tokens


def _log_probs(model: LlamaForCausalLM, state: Tensor) -> Tensor:
    """Returns the model's log-probabilities of every place, in which the mask is never an answer."""
    logits = model(state, attention_mask=full_mask(state != PAD), use_cache=False).logits.float()
    return logits.index_fill(-1, torch.tensor([MASK], device=logits.device), -torch.inf).log_softmax(-1)


def _is_ended(ids: Tensor, answers: Tensor) -> Tensor:
    """Says which answers have an end of text with nothing open before it, or nothing open at all, bool `[rows]`."""
    open_before = (ids == MASK).cumsum(1) > 0
    return (answers & (ids == EOS) & ~open_before).any(1) | ~(ids == MASK).any(1)


def log_probs_of(model: LlamaForCausalLM, rollouts: ListRollouts) -> Tensor:
    """Returns the log-probabilities of the decided tokens, each at the state it was decided in: `[tokens]`.

    They come slice after slice, as ``rollouts.decided.nonzero()`` lists them.
    """
    chosen = _log_probs(model, rollouts.states)[rollouts.decided]
    return chosen.gather(-1, rollouts.tokens[rollouts.decided][:, None])[:, 0]
