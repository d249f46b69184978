"""Decodes as the published scripts do, for comparison: over the whole canvas, with all logits and float64 softmax.

It is the slow reference of `decode` with the rule ``quota`` and no cache. It cannot stop early, needs prompts of one
length and uses none of our kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["plain_decode"]


@torch.no_grad()
def plain_decode(
    model: Any,
    input_ids: Tensor,
    *,
    mask_token_id: int,
    max_new_tokens: int,
    block_size: int,
    steps_per_block: int,
    rows_at_once: int | None = None,
) -> tuple[Tensor, int]:
    """Fills `max_new_tokens` masks after prompts of one length, block by block, greedily and the surest first.

    Args:
        model: a transformers model with a language-model head, in which every token sees all others.
        input_ids: int64 `[B, L]`.
        mask_token_id: of the model.
        max_new_tokens: a multiple of `block_size`.
        block_size: positions of a block.
        steps_per_block: forwards per block; each fills as many positions, the first ones the remainder.
        rows_at_once: rows whose logits and float64 probabilities are in memory at once; None is all of them.

    Returns:
        Tokens `[B, L + max_new_tokens]` and the number of forwards.

    Source: LLaDA, arXiv 2502.09992, algorithm 4 with low-confidence remasking at temperature 0.
    """
    batch, length = input_ids.shape
    canvas = torch.cat([input_ids, input_ids.new_full((batch, max_new_tokens), mask_token_id)], 1)
    sees = torch.ones(1, 1, canvas.shape[1], canvas.shape[1], dtype=torch.bool, device=canvas.device)
    forwards = 0
    for first in range(length, canvas.shape[1], block_size):
        for step in range(steps_per_block):
            take = block_size // steps_per_block + (step < block_size % steps_per_block)
            for row in range(0, batch, rows_at_once or batch):
                part = canvas[row : row + (rows_at_once or batch)]
                _step(model, part, sees.expand(len(part), -1, -1, -1), mask_token_id, first, first + block_size, take)
            forwards += 1
    return canvas, forwards


def _step(model: Any, canvas: Tensor, sees: Tensor, mask: int, first: int, last: int, take: int) -> None:
    logits = model(input_ids=canvas, attention_mask=sees).logits
    logits[..., mask] = -torch.inf
    probs = logits.double().softmax(-1)
    surest, token = probs.max(-1)
    surest[canvas != mask] = -torch.inf
    surest[:, :first], surest[:, last:] = -torch.inf, -torch.inf
    chosen = surest.topk(take, dim=1).indices
    canvas.scatter_(1, chosen, token.gather(1, chosen))
