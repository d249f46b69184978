"""Measures how much one token of a `lists` model's answer tells about another, and teaches a head to predict it.

A masked place is filled with a token that the model draws there, and the model is asked again: the total variation by
which its distributions at the other masks change is one sample of their dependence. Importing this module loads torch.

Source: DEMASK, arXiv 2604.02560.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from partsong.samplers.text.dependence.head import DependenceHead, doubt_of, least_of_pairs
from partsong_zoo.lists.model import MASK, full_mask
from partsong_zoo.lists.training import ListsBatch, draw_masks

__all__ = ["TokenChanges", "dependence_loss", "measure_changes", "predicted_changes"]

#: Pairs of which one is surer than this teach nothing: whatever the head says counts as much at most.
_LEAST_DOUBT = 1e-3


class TokenChanges(NamedTuple):
    """Holds what filling some masked places has changed.

    Attributes:
        hidden: states before, `[batch, length, width]`.
        doubt: that of each place's distribution before (see `doubt_of`), `[batch, length]`; 0 where nothing is masked.
        row: the answers in which a place was filled, int64 `[fills]`.
        place: that place, int64 `[fills]`.
        variation: by how much that changed every place's distribution, in total variation, `[fills, length]`.
        counts: where that says something, bool `[fills, length]`: between two masked places that are in doubt.
    """

    hidden: Tensor
    doubt: Tensor
    row: Tensor
    place: Tensor
    variation: Tensor
    counts: Tensor

    def at(self, pairs: Tensor) -> Tensor:
        """Takes what concerns the filled places, `[fills, length]`, out of `[batch, length, length]`."""
        return pairs[self.row, self.place]


@torch.no_grad()
def measure_changes(
    model: LlamaForCausalLM, batch: ListsBatch, rng: np.random.Generator, fills: int, *, draws: int = 1
) -> TokenChanges:
    """Masks some of the answers' tokens, fills one masked place at a time, and measures what changes.

    Args:
        model: a `lists` model that fills masks.
        batch: prompts and answers.
        rng: draws the masks, the places and the tokens.
        fills: places of the whole batch that are filled, drawn by their doubt: most answers have none.
        draws: tokens drawn for each of them; `variation` is the mean.
    """
    masked, _ = draw_masks(batch.canvas, rng)
    noisy = batch.ids.masked_fill(masked, MASK)
    hidden, before = _read(model, noisy, batch.valid)
    top = before.topk(2, dim=-1).values
    doubt = torch.where(masked, doubt_of(top[..., 0], top[..., 0] - top[..., 1]), 0.0)
    torch.manual_seed(int(rng.integers(2**62)))
    chosen = (doubt + 1e-6 * masked).flatten().multinomial(fills, replacement=True)
    row, place = chosen // doubt.shape[1], chosen % doubt.shape[1]
    tokens = before[row, place].multinomial(draws, replacement=True)
    filled = (
        noisy[row, None].repeat(1, draws, 1).scatter(2, place[:, None, None].expand(-1, draws, 1), tokens[..., None])
    )
    _, after = _read(model, filled.flatten(0, 1), batch.valid[row].repeat_interleave(draws, 0))
    after = after.view(fills, draws, *before.shape[1:])
    variation = (after - before[row, None]).abs().sum(-1).mean(1) / 2
    return TokenChanges(hidden, doubt, row, place, variation, least_of_pairs(doubt)[row, place] > _LEAST_DOUBT)


def _read(model: LlamaForCausalLM, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Returns states and distributions; the mask is never an answer."""
    hidden = model.model(input_ids=tokens, attention_mask=full_mask(valid), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    logits[..., MASK] = -torch.inf
    return hidden, logits.softmax(-1)


def predicted_changes(head: DependenceHead, changes: TokenChanges) -> Tensor:
    """Returns what a head predicts for the variation, `[fills, length]`."""
    return changes.at(head(changes.hidden, changes.doubt))


def dependence_loss(head: DependenceHead, changes: TokenChanges) -> Tensor:
    """Returns the mean cross-entropy of the measured changes, in nats; it is least where the head predicts their means.

    A single change is a sample of the dependence and scatters around it. Squares of differences would be small where
    dependences are, and many small ones add up to a step's bound.

    Args:
        head: the head.
        changes: what was measured.
    """
    counts = changes.counts
    limit = changes.at(least_of_pairs(changes.doubt))[counts]
    scores = changes.at(head.scores(changes.hidden, changes.doubt))[counts]
    log_yes = limit.log() + F.logsigmoid(scores)
    log_no = torch.log1p(-(limit * scores.sigmoid()).clamp(max=1 - 1e-6))
    truth = changes.variation[counts].clamp(max=1.0)
    return -(truth * log_yes + (1 - truth) * log_no).sum() / counts.sum().clamp(min=1)
