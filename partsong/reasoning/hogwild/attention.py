"""Computes one forward of several workers, each of which sees the same blocks of keys in an order of its own.

For each block that a worker sees, its queries are rotated by the distance between their own position and the block's
beginning. So no key is moved, copied or rotated again (Hogwild! Inference, Rodionov et al., arXiv 2504.06261). The
scores of all blocks go through one softmax. Keys lie in pages of one size, so that any number of blocks takes one
matrix product per slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partsong.reasoning.hogwild.cache import PAGE, SLAB, BlockStore, CacheBlock
from partsong.reasoning.hogwild.rotary import Rotary
from partsong.reasoning.local.model import LocalModel

__all__ = ["Feed", "ViewStep", "forward"]


class Feed(NamedTuple):
    """Names tokens that are read in a step.

    Attributes:
        view: the blocks they see, in order. The tokens become the end of the last one.
        tokens: at least one token.
        asked: whether the logits after the last of them are needed.
    """

    view: Sequence[CacheBlock]
    tokens: Sequence[int]
    asked: bool = True


def forward(model: LocalModel, rotary: Rotary, store: BlockStore, feeds: Sequence[Feed]) -> Tensor:
    """Reads tokens and writes their keys.

    Every token sees its own block up to itself, and the other blocks of its view as they are after the step. So
    workers see each other's tokens of the same step.

    Args:
        model: the model that computes.
        rotary: the model's rotary embedding.
        store: the store of all blocks.
        feeds: the tokens; no two feeds write to one block.

    Returns:
        Logits `[feeds that ask, vocabulary]`.
    """
    step = ViewStep(store, rotary, feeds)
    ends = torch.tensor([len(feed.tokens) for feed in feeds]).cumsum(0) - 1
    keep = [end for end, feed in zip(ends.tolist(), feeds, strict=True) if feed.asked]
    tokens = [token for feed in feeds for token in feed.tokens]
    attends: Any = step
    # At position 0 the model rotates neither queries nor keys. Both are rotated here, where the block is known.
    return model.forward(tokens, [0] * len(tokens), keep, attends)


class ViewStep:
    """Computes the attention of a step's tokens.

    Args:
        store: the store of all blocks; those that are written to grow.
        rotary: rotates queries and keys.
        feeds: the tokens.
    """

    def __init__(self, store: BlockStore, rotary: Rotary, feeds: Sequence[Feed]) -> None:
        targets = [feed.view[-1].number for feed in feeds]
        assert len(set(targets)) == len(targets) and all(feed.tokens for feed in feeds)
        self.store, self.rotary = store, rotary
        device = rotary.frequencies.device
        before = [feed.view[-1].length for feed in feeds]
        slots = [slot for feed in feeds for slot in store.extend(feed.view[-1], len(feed.tokens))]
        self._slabs = store.slabs()
        self._targets = _targets(slots, len(self._slabs), device)
        first, seen = (x.to(device) for x in _views(feeds, len(store.blocks)))
        feed_of = torch.tensor([n for n, feed in enumerate(feeds) for _ in feed.tokens], device=device)
        places = torch.tensor(
            [old + i for old, feed in zip(before, feeds, strict=True) for i in range(len(feed.tokens))], device=device
        )
        own = torch.tensor(targets, device=device)[feed_of]
        dtype = store.dtype
        self._key_tables = tuple(table[:, None] for table in rotary.tables(places, dtype))
        # [blocks, tokens]: how far each token stands from each block's beginning, and how much of the block it sees.
        standing = first[feed_of, own] + places
        distance, visible = standing[None] - first[feed_of].T, seen[feed_of].T.clone()
        visible[own, torch.arange(len(places), device=device)] = places + 1
        self._query_tables = tuple(table[:, None, :, None] for table in rotary.tables(distance, dtype))
        block_of, start = torch.tensor(store.pages, device=device).T
        self._block_of = block_of
        unseen = torch.arange(PAGE, device=device) >= (visible[block_of] - start[:, None])[..., None]
        # Most pages are seen whole by all. This mask is for the others: [pages, 1, tokens, 1, PAGE]
        self._partly = unseen.flatten(1).any(dim=1).nonzero()[:, 0]
        self._hidden = unseen[self._partly][:, None, :, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Writes the step's keys, then attends.

        Args:
            layer: the number of the layer.
            query: `[1, heads, tokens, head_dim]`, not rotated.
            key: `[1, kv_heads, tokens, head_dim]`, not rotated.
            value: of the same shape.
            scale: factor on the scores.

        Returns:
            `[1, tokens, heads, head_dim]`.
        """
        turns = self.rotary.layers[layer]
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if turns:
            keys = self.rotary.turned(keys, *self._key_tables)
        for number, rows, pages, places in self._targets:
            slab = self._slabs[number]
            slab.keys[layer][pages, :, places] = keys[rows]
            slab.values[layer][pages, :, places] = values[rows]
        # [kv_heads, tokens, group, head_dim], then one such per block
        queries = (query[0] * scale).unflatten(0, (key.shape[1], -1)).transpose(1, 2)
        turned = self.rotary.turned(queries, *self._query_tables) if turns else queries[None]
        out = self._read(layer, turned)
        return out.transpose(0, 1).flatten(1, 2)[None]

    def _read(self, layer: int, queries: Tensor) -> Tensor:
        """Attends with queries `[blocks or 1, kv_heads, tokens, group, head_dim]`; drops the first dimension."""
        _, heads, tokens, group, width = queries.shape
        parts: list[Tensor] = []
        for slab in self._slabs:
            blocks = self._block_of[slab.pages]
            split = queries[blocks] if len(queries) > 1 else queries.expand(len(blocks), -1, -1, -1, -1)
            keys = slab.keys[layer][: len(blocks)].flatten(0, 1)
            scores = torch.bmm(split.reshape(-1, tokens * group, width), keys.transpose(1, 2))
            parts.append(scores.view(-1, heads, tokens, group, PAGE))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts)
        scores[self._partly] = scores[self._partly].masked_fill(self._hidden, -math.inf)
        count = len(scores)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.permute(1, 2, 3, 0, 4).flatten(3).softmax(dim=-1, dtype=wide).to(scores.dtype)
        weights = weights.unflatten(3, (count, PAGE)).permute(3, 0, 1, 2, 4)
        out: Tensor | None = None
        for slab in self._slabs:
            share = weights[slab.pages].reshape(-1, tokens * group, PAGE)
            values = slab.values[layer][: len(share) // heads].flatten(0, 1)
            part = torch.bmm(share, values).view(-1, heads, tokens, group, width).sum(dim=0)
            out = part if out is None else out + part
        assert out is not None
        return out


def _views(feeds: Sequence[Feed], num_blocks: int) -> tuple[Tensor, Tensor]:
    """Says, by feed and block, at which position the view shows the block and how many tokens of it (0: not shown)."""
    first = [[0] * num_blocks for _ in feeds]
    seen = [[0] * num_blocks for _ in feeds]
    for feed, begins, counts in zip(feeds, first, seen, strict=True):
        position = 0
        for block in feed.view:
            begins[block.number], counts[block.number] = position, block.length
            position += block.length
    return torch.tensor(first), torch.tensor(seen)


def _targets(slots: list[int], num_slabs: int, device: torch.device) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Says where tokens are written, by slab: its number, the tokens, their pages there and their places in these."""
    targets = []
    for number in range(num_slabs):
        rows = [row for row, slot in enumerate(slots) if slot // (SLAB * PAGE) == number]
        if rows:
            pages = [slots[row] // PAGE % SLAB for row in rows]
            places = [slots[row] % PAGE for row in rows]
            targets.append((number, *(torch.tensor(x, device=device) for x in (rows, pages, places))))
    return targets
