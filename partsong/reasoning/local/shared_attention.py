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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from partsong.kernels import Causal, Segment, attention
from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.prefix_node import PrefixNode

__all__ = ["Branches", "Chunk", "AttentionStep", "branches_of"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Names tokens of a prompt that are computed in a step.

    Attributes:
        node: the node that holds their keys.
        first: the first of them, within the node.
        count: how many there are.
        place: the place of the first one among the step's tokens.
        masks: how many masks follow the last of them; they come next among the step's tokens.
    """

    node: PrefixNode
    first: int
    count: int
    place: int
    masks: int = 0

    @property
    def end(self) -> int:
        """Returns the place after the last one."""
        return self.place + self.count


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
    """Computes the attention of one forward: of one or several tokens of every row, then of chunks of prompts.

    Args:
        store: the keys of the rows' own tokens.
        lengths: how many tokens each row has there, without those of this step.
        branches: what else the rows read.
        chunks: the chunks of prompts.
        parents: for every row the nodes and masks of its draft, each by the one before it (see
            `DraftTree.row_parents`). A row's tokens are node 0 and these. Default: one token per row.

    Attributes:
        size: tokens and masks of rows and chunks.
    """

    def __init__(
        self,
        store: AnswerStore,
        lengths: Sequence[int],
        branches: Branches,
        chunks: Iterable[Chunk],
        parents: Sequence[Sequence[int]] = (),
    ) -> None:
        self.store, self.branches, self.chunks = store, branches, tuple(chunks)
        self.num_rows, device = len(lengths), store.keys.device
        counts = [1 + len(draft) for draft in parents] if parents else [1] * self.num_rows
        self.num_tokens, self._most = sum(counts), max(counts, default=1)
        self.size = self.num_tokens + sum(chunk.count + chunk.masks for chunk in self.chunks)
        self._longest = max((length + count for length, count in zip(lengths, counts, strict=True)), default=1)
        slots, rows = (
            torch.tensor(lengths, dtype=torch.int64, device=device),
            torch.arange(self.num_rows, device=device),
        )
        self._hidden: Tensor | None = None
        self._added: Tensor | None = None
        #: Index of each token among `_most` tokens of every row; None if all rows have as many.
        self._padded: Tensor | None = None
        #: Where keys of the tokens are written in a layer of the store. One slot for all is found without an index.
        self._where: Any = (slice(0, self.num_rows), slice(None), lengths[0] if self.num_rows else 0)
        if self._most == 1:
            if len(set(lengths)) > 1:
                self._where = (rows, slice(None), slots)
                self._hidden = (torch.arange(self._longest, device=device) > slots[:, None])[:, None, None]
            return
        node = torch.cat([torch.arange(count) for count in counts]).to(device)
        rows = rows.repeat_interleave(torch.tensor(counts, device=device))
        self._where = (rows, slice(None), slots[rows] + node)
        if min(counts) < self._most:
            self._padded = rows * self._most + node
        self._hidden = _hidden_of(lengths, parents, self._most, self._longest).to(device)

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
        count = self.num_tokens
        # Every key is written before any is read: a chunk may continue one of the same step.
        if count:
            self.store.keys[layer][self._where] = key[0, :, :count].transpose(0, 1)
            self.store.values[layer][self._where] = value[0, :, :count].transpose(0, 1)
        for chunk in self.chunks:
            here, there = _span(chunk.place, chunk.count), _span(chunk.first, chunk.count)
            assert chunk.node.keys is not None and chunk.node.values is not None
            chunk.node.keys[layer][:, there] = key[0, :, here]
            chunk.node.values[layer][:, there] = value[0, :, here]
        parts = [self._rows_attend(layer, query[0, :, :count].transpose(0, 1), scale)] if count else []
        for chunk in self.chunks:
            here = _span(chunk.place, chunk.count + chunk.masks)
            parts.append(_chunk_attends(layer, [x[:, :, here] for x in (query, key, value)], chunk, scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _rows_attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Lets queries of rows, `[tokens, heads, head_dim]`, attend to their chains and to their rows' own tokens."""
        keys, values = (
            x[: self.num_rows, :, : self._longest] for x in (self.store.keys[layer], self.store.values[layer])
        )
        split = self._by_rows(query, keys.shape[1])
        if not self.branches.width:
            out = F.scaled_dot_product_attention(split, keys, values, self._bias(split), scale=scale)
            return self._by_tokens(out)
        longest, width = self._longest, self.branches.width
        split = split * scale
        scores = split.new_empty(*split.shape[:3], width + longest)
        if self.branches.ragged:
            scores[..., :width] = -math.inf
        for node, where, which in self.branches.parts:
            assert node.keys is not None
            part = torch.bmm(_by_head(split[which]), node.keys[layer].transpose(1, 2))
            scores[which, :, :, where] = _by_row(part, split.shape[2])
        own_keys, own_values = (x.flatten(0, 1) for x in (keys, values))
        own = torch.bmm(split.reshape(-1, *split.shape[2:]), own_keys.transpose(1, 2)).view(*split.shape[:3], longest)
        bias = self._bias(split)
        scores[..., width:] = own if bias is None else own + bias
        weights = scores.softmax(dim=-1)
        out = torch.bmm(weights[..., width:].reshape(-1, split.shape[2], longest), own_values).view(split.shape)
        for node, where, which in self.branches.parts:
            assert node.values is not None
            read = torch.bmm(_by_head(weights[which, :, :, where]), node.values[layer])
            # The rows are a slice or distinct indices, so nothing is added twice into one place.
            out[which] += _by_row(read, split.shape[2])
        return self._by_tokens(out)

    def _bias(self, split: Tensor) -> Tensor | None:
        """Returns what is added to scores `[rows, kv_heads, tokens * group, slots]`: it takes keys out of them."""
        if self._hidden is not None and self._added is None:
            group = split.shape[2] // self._most
            hidden = self._hidden.repeat_interleave(group, dim=2)
            self._added = split.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        return self._added

    def _by_rows(self, query: Tensor, heads: int) -> Tensor:
        """Turns `[tokens, heads, head_dim]` into `[rows, kv_heads, tokens * group, head_dim]`."""
        if self._most == 1:
            return query.view(self.num_rows, heads, -1, query.shape[2])
        if self._padded is not None:
            padded = query.new_zeros(self.num_rows * self._most, *query.shape[1:])
            padded[self._padded] = query
            query = padded
        split = query.view(self.num_rows, self._most, heads, -1, query.shape[2])
        return split.transpose(1, 2).reshape(self.num_rows, heads, -1, query.shape[2])

    def _by_tokens(self, out: Tensor) -> Tensor:
        """Turns the result of `_by_rows` back."""
        rows, heads, _, width = out.shape
        if self._most == 1:
            return out.view(rows, -1, width)
        flat = out.view(rows, heads, self._most, -1, width).transpose(1, 2).reshape(rows * self._most, -1, width)
        return flat if self._padded is None else flat[self._padded]


def _hidden_of(lengths: Sequence[int], parents: Sequence[Sequence[int]], most: int, longest: int) -> Tensor:
    """Marks the slots each token does not see, `[rows, 1, tokens, slots]`: all but the text before and its ancestors.

    Padding of a shorter draft sees what node 0 sees; its results are never read.
    """
    hidden = np.ones((len(lengths), most, longest), bool)
    for row, (length, draft) in enumerate(zip(lengths, parents, strict=True)):
        hidden[row, :, :length] = False
        # A node's ancestors as the bits of a number: one operation for each node, however deep it lies.
        sees = [1]
        for node, parent in enumerate(draft, 1):
            sees.append(sees[parent] | 1 << node)
        own, width = len(sees), -(-len(sees) // 8)
        bits = np.frombuffer(b"".join(each.to_bytes(width, "little") for each in sees), np.uint8).reshape(own, width)
        hidden[row, :own, length : length + own] = np.unpackbits(bits, axis=1, count=own, bitorder="little") == 0
        hidden[row, own:, length] = False
    return torch.from_numpy(hidden)[:, None]


def _by_head(x: Tensor) -> Tensor:
    """Turns `[rows, kv_heads, group, n]` into `[kv_heads, rows * group, n]`."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])


def _by_row(x: Tensor, group: int) -> Tensor:
    """Turns the result of `_by_head` back, as a view."""
    return x.view(x.shape[0], -1, group, x.shape[2]).transpose(0, 1)


def _span(first: int, count: int) -> slice:
    return slice(first, first + count)


def _chunk_attends(layer: int, here: Sequence[Tensor], chunk: Chunk, scale: float) -> Tensor:
    """Lets tokens of a prompt and the masks after them attend to all before; `[tokens and masks, heads, head_dim]`.

    Args:
        layer: the number of the layer.
        here: query, key and value of the tokens and masks. Those of masks, which no token sees, are not kept.
        chunk: where they stand.
        scale: factor on the scores.
    """
    query, *new = here
    node, *before = chunk.node.chain()[::-1]
    earlier = None
    if before:
        segments = [_segment(each, layer, len(each.tokens)) for each in before[::-1]]
        earlier = attention(query, segments=segments, scale=scale)
    own = _segment(node, layer, chunk.first + chunk.count)
    key, value = own.k, own.v
    if chunk.masks:
        key, value = (torch.cat([old, x[:, :, chunk.count :]], 2) for old, x in zip((key, value), new, strict=True))
    out, _ = attention(query, key, value, mask=Causal(chunk.first), scale=scale, init=earlier)
    return out[0].transpose(0, 1)


def _segment(node: PrefixNode, layer: int, length: int) -> Segment:
    assert node.keys is not None and node.values is not None
    return Segment(node.keys[layer][None, :, :length], node.values[layer][None, :, :length])
