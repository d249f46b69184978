"""Computes attention for training the `motion` transformers on a CPU. Importing this module loads torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns pairs of neighbouring channels of `[batch, tokens, heads, channels]` by their positions' angles."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cosine[..., 0::2], sine[..., 1::2]
    return torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)


def lookback_blocks(blocks: int, lookback: int) -> Tensor:
    """Says which blocks each block sees if these are itself and `lookback` blocks before it: `[blocks, blocks]`."""
    back = torch.arange(blocks)[:, None] - torch.arange(blocks)
    return (back >= 0) & (back <= lookback)


class TrainingAttention:
    """Computes what the stock processors of Wan and SkyReels-V2 do, written out and with a bias for the text.

    It is written out because at these lengths a CPU takes far longer for the backward pass of fused attention.
    `text_bias` `[batch, 1, 1, tokens]` is added to the scores of cross-attention: the pipelines pad a text up to
    `max_sequence_length` with zeros, all equal and without positions, so n of them are one whose score is raised by
    log n. Training with that bias is exact and covers any `max_sequence_length`. `sees` `[tokens, tokens]` takes the
    place of the model's own mask.
    """

    def __init__(self) -> None:
        self.text_bias: Tensor | None = None
        self.sees: Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attends to the video itself, or to the text `encoder_hidden_states`; a mask is True where a token sees."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states).float()).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(source).float()).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        if rotary_emb is not None:
            query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)
        query = (query * query.shape[-1] ** -0.5).to(value.dtype).transpose(1, 2)
        # Mixed precision would compute the softmax in float32, which costs as much as all products together.
        with torch.autocast(value.device.type, enabled=False):
            scores = query @ key.to(value.dtype).permute(0, 2, 3, 1)
            if encoder_hidden_states is not None and self.text_bias is not None:
                scores = scores + self.text_bias.to(scores.dtype)
            if attention_mask is not None:
                attention_mask = attention_mask if self.sees is None else self.sees
                scores = scores.masked_fill(~attention_mask, -torch.inf)
            out = torch.softmax(scores, dim=-1) @ value
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))
