"""Lets many branches attend to the prompts they share and to their own text, without repeating a key.

All tokens of a step lie in one row, whatever sequence they belong to. The queries of all branches of a prompt are
stacked and multiplied with its keys once (the idea of Hydragen, Juravsky et al., arXiv 2402.05099). The scores of all
parts of a sequence then stand side by side under one softmax, so nothing has to be merged. Grouped key heads are read
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.kernels import Causal, Segment, attention
from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.prefix_tree import PrefixNode

__all__ = ["Branches", "Chunk", "AttentionStep", "branches_of"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Names tokens of a prompt that are computed in a step.

    Attributes:
        node: the node that holds their keys.
        first: the first of them, within the node.
        count: how many there are.
        place: the place of the first one among the step's tokens.
    """

    node: PrefixNode
    first: int
    count: int
    place: int


@dataclass(frozen=True, slots=True)
class Branches:
    """Says which rows read which nodes. It changes only when rows come or go.

    Attributes:
        parts: (node, where its keys lie in the chain, rows that read it there). Rows that lie together are a slice.
        width: how many keys the longest chain has.
        ragged: whether some chains are shorter.
    """

    parts: tuple[tuple[PrefixNode, slice, slice | Tensor], ...]
    width: int
    ragged: bool


def branches_of(chains: Sequence[Sequence[PrefixNode]], device: torch.device) -> Branches:
    """Collects the nodes that rows 0, 1, ... read, each with its rows."""
    # Nodes hash as themselves. After a join there are more keys before a node than its position says.
    rows: dict[tuple[PrefixNode, int], list[int]] = {}
    ends: list[int] = []
    for row, chain in enumerate(chains):
        width = 0
        for node in chain:
            rows.setdefault((node, width), []).append(row)
            width += len(node.tokens)
        ends.append(width)
    parts = tuple(
        (node, _span(first, len(node.tokens)), _together(which, device)) for (node, first), which in rows.items()
    )
    return Branches(parts, max(ends, default=0), len(set(ends)) > 1)


def _together(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


class AttentionStep:
    """Computes the attention of one forward: of a token of every row, then of chunks of prompts.

    Args:
        store: the keys of what the rows have written.
        lengths: how many tokens each row has there, without the one of this step.
        branches: what else the rows read.
        chunks: the chunks of prompts.
    """

    def __init__(self, store: AnswerStore, lengths: Sequence[int], branches: Branches, chunks: Iterable[Chunk]) -> None:
        self.store, self.branches, self.chunks = store, branches, tuple(chunks)
        self.num_rows = len(lengths)
        device = store.keys.device
        self._slots = torch.tensor(lengths, dtype=torch.int64, device=device)
        self._rows = torch.arange(self.num_rows, device=device)
        self._longest = max(lengths, default=0) + 1
        self._hidden: Tensor | None = None
        if len(set(lengths)) > 1:
            unseen = torch.arange(self._longest, device=device) > self._slots[:, None]
            self._hidden = unseen[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Writes the step's keys, then attends.

        Args:
            layer: the number of the layer.
            query: `[1, heads, tokens, head_dim]`.
            key: `[1, kv_heads, tokens, head_dim]`.
            value: of the same shape.
            scale: factor on the scores.

        Returns:
            `[1, tokens, heads, head_dim]`.
        """
        rows = self.num_rows
        # Every key is written before any is read: a chunk may continue one of the same step.
        if rows:
            self.store.keys[layer][self._rows, :, self._slots] = key[0, :, :rows].transpose(0, 1)
            self.store.values[layer][self._rows, :, self._slots] = value[0, :, :rows].transpose(0, 1)
        for chunk in self.chunks:
            here, there = _span(chunk.place, chunk.count), _span(chunk.first, chunk.count)
            assert chunk.node.keys is not None and chunk.node.values is not None
            chunk.node.keys[layer][:, there] = key[0, :, here]
            chunk.node.values[layer][:, there] = value[0, :, here]
        parts = [self._rows_attend(layer, query[0, :, :rows].transpose(0, 1), scale)] if rows else []
        for chunk in self.chunks:
            parts.append(_chunk_attends(layer, query[:, :, _span(chunk.place, chunk.count)], chunk, scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _rows_attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Lets one query per row, `[rows, heads, head_dim]`, attend to its chain and to its own tokens."""
        keys, values = self.store.keys[layer], self.store.values[layer]
        rows, (heads, width), longest = self.num_rows, keys.shape[1::2], self._longest
        split = (query * scale).view(rows, heads, -1, keys.shape[3])
        width = self.branches.width
        scores = split.new_empty(*split.shape[:3], width + longest)
        if self.branches.ragged:
            scores[..., :width] = -math.inf
        for node, where, which in self.branches.parts:
            assert node.keys is not None
            part = torch.bmm(_by_head(split[which]), node.keys[layer].transpose(1, 2))
            scores[which, :, :, where] = _by_row(part, split.shape[2])
        own_keys, own_values = (x[:rows].reshape(-1, *x.shape[2:])[:, :longest] for x in (keys, values))
        own = torch.bmm(split.reshape(-1, *split.shape[2:]), own_keys.transpose(1, 2)).view(*split.shape[:3], longest)
        scores[..., width:] = own if self._hidden is None else own.masked_fill_(self._hidden, -math.inf)
        weights = scores.softmax(dim=-1)
        out = torch.bmm(weights[..., width:].reshape(-1, split.shape[2], longest), own_values).view(split.shape)
        for node, where, which in self.branches.parts:
            assert node.values is not None
            read = torch.bmm(_by_head(weights[which, :, :, where]), node.values[layer])
            # The rows are a slice or distinct indices, so nothing is added twice into one place.
            out[which] += _by_row(read, split.shape[2])
        return out.view(rows, -1, split.shape[3])


def _by_head(x: Tensor) -> Tensor:
    """Turns `[rows, kv_heads, group, n]` into `[kv_heads, rows * group, n]`."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])


def _by_row(x: Tensor, group: int) -> Tensor:
    """Turns the result of `_by_head` back, as a view."""
    return x.view(x.shape[0], -1, group, x.shape[2]).transpose(0, 1)


def _span(first: int, count: int) -> slice:
    return slice(first, first + count)


def _chunk_attends(layer: int, query: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """Lets queries `[1, heads, count, head_dim]` of a prompt attend to all before; `[count, heads, head_dim]`."""
    node, *before = chunk.node.chain()[::-1]
    earlier = None
    if before:
        segments = [_segment(each, layer, len(each.tokens)) for each in before[::-1]]
        earlier = attention(query, segments=segments, scale=scale)
    own = _segment(node, layer, chunk.first + chunk.count)
    out, _ = attention(query, own.k, own.v, mask=Causal(chunk.first), scale=scale, init=earlier)
    return out[0].transpose(0, 1)


def _segment(node: PrefixNode, layer: int, length: int) -> Segment:
    assert node.keys is not None and node.values is not None
    return Segment(node.keys[layer][None, :, :length], node.values[layer][None, :, :length])
