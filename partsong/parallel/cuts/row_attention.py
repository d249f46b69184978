"""Describes self-attention over an image whose rows are cut over ranks, optionally with keys of a text in front."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.adapters.row import IMAGE, TEXT
from partsong.parallel.attention_call import AttentionCall
from partsong.parallel.cuts.whole_views import with_silent_queries
from partsong.parallel.ranks.mesh import Axis

__all__ = ["Given", "call_over_rows"]

#: What `torch.nn.functional.scaled_dot_product_attention` was given: queries, keys, values, mask and scale.
Given = tuple[Tensor, Tensor, Tensor, Tensor | None, float | None]


def call_over_rows(
    name: str, layer: int, given: Given, *, rows: Sequence[int], axis: Axis, joined: bool
) -> AttentionCall:
    """Describes an attention from this rank's rows to those of all ranks.

    Every rank has the whole text. Each keeps its share of the text's keys, so that every key takes part once.

    Args:
        name: the attention module, for messages.
        layer: its number.
        given: queries `[B, H, L, D]` of L positions in this rank's rows, keys `[B, H, T + L, D]`, their values, a mask
            of the text's keys `[B, H, 1, T]` or `[B, H, 1, T + L]`, and the logit scale. T is 0 without a text.
        rows: rows of every rank.
        axis: the ranks.
        joined: whether keys of a text stand in front of the image's.

    Returns:
        The call; its last L queries are those given.

    Raises:
        UnsupportedError: queries and keys do not fit the rows, or positions of the image are masked.
    """
    query, key, value, mask, scale = given
    index = axis.index
    positions, text = query.shape[2], key.shape[2] - query.shape[2]
    if positions % rows[index] or text < 0 or (text and not joined):
        raise UnsupportedError(
            f"{name}: attends {positions} queries to {key.shape[2]} keys where this rank holds {rows[index]} rows; "
            "this call form cannot be cut"
        )
    if mask is not None and not joined:
        raise UnsupportedError(f"{name}: attention masks are not supported over rows")
    images = tuple(count * (positions // rows[index]) for count in rows)
    if not joined:
        return AttentionCall(layer, query, key, value, images, index, None, scale)
    texts = axis.split(text)
    masks = None if mask is None else _masks(mask, texts, images)
    query, key, value, _ = with_silent_queries(query, key, value, None, sizes=texts, index=index, first=True)
    shards = tuple(zip(texts, images, strict=True))
    runs = tuple(((TEXT, words), (IMAGE, positions)) for words, positions in shards)
    return AttentionCall(layer, query, key, value, tuple(map(sum, shards)), index, masks, scale, runs=runs)


def _masks(mask: Tensor, texts: Sequence[int], images: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns the key mask of every rank: its share of the text's mask, and nothing masked of the image."""
    shares = mask[:, :1, :, : sum(texts)].split(list(texts), dim=3)
    is_seen = mask.dtype == torch.bool  # other masks are added, and 0 changes nothing
    return tuple(
        torch.cat([share, share.new_full((*share.shape[:3], positions), is_seen)], dim=3)
        for share, positions in zip(shares, images, strict=True)
    )
