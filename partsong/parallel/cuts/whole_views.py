"""Brings token splitting to attentions and layers that look beyond a rank's own tokens in their own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partsong.parallel.hooks.model_hooks import Attend
from partsong.parallel.ranks.shards import offsets

__all__ = ["attend_at", "mask_by_shard", "with_silent_queries"]


def attend_at(
    places: Tensor, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Computes attention of some tokens to each other, with zeros as the result of the others.

    Args:
        places: where the tokens are among those of `query`.
        attend: computes it for them alone.
        query: `[B, H, L, D]`.
        key: as `query`.
        value: as `query`.
        mask: of these tokens, or of all tokens of all ranks, which stays.
        scale: logit scale.
    """
    held, places = query.shape[2], places.to(query.device)
    for dim in (-2, -1):
        if mask is not None and mask.ndim > 1 and mask.shape[dim] == held:
            mask = mask.index_select(dim, places)
    query, key, value = (tensor.index_select(2, places) for tensor in (query, key, value))
    output = attend(query, key, value, mask, scale)
    return output.new_zeros(*output.shape[:2], held, output.shape[3]).index_copy(2, places, output)


def mask_by_shard(mask: Tensor, sizes: Mapping[str, tuple[int, ...]], streams: Sequence[str]) -> Tensor:
    """Orders a mask of all queries and keys, stream after stream, by the ranks that hold them.

    Args:
        mask: `[B, 1, L, L]`.
        sizes: tokens of each rank, by stream.
        streams: the streams in the order of the mask.
    """
    places: list[list[Tensor]] = []
    first = 0
    for stream in streams:
        total = sum(sizes[stream])
        places.append(list(torch.arange(first, first + total, device=mask.device).split(list(sizes[stream]))))
        first += total
    order = torch.cat([part for parts in zip(*places, strict=True) for part in parts])
    return mask[:, :, order][:, :, :, order]


def with_silent_queries(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, sizes: tuple[int, ...], index: int, first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Turns keys that every rank holds whole into a stream that is cut like any other.

    Each rank keeps its share of those keys, and adds queries of zeros for it, whose results are never read. So every
    key takes part once, and the exchange needs to know nothing of this.

    Args:
        query: `[B, H, L, D]`, of this rank's tokens.
        key: `[B, H, T + L, D]`, with the T whole keys in front, or behind.
        value: as `key`.
        mask: key mask `[B, 1, 1, T + L]`, also with a row for each query or head, a mask of all tokens of all ranks,
            which stays, or None.
        sizes: how the T keys are shared out.
        index: this rank.
        first: whether the whole keys are in front.
    """
    total, local = sum(sizes), query.shape[2]

    def share(tensor: Tensor, dim: int) -> Tensor:
        shared = tensor.narrow(dim, 0 if first else local, total)
        own = tensor.narrow(dim, total if first else 0, local)
        part = shared.narrow(dim, offsets(sizes)[index], sizes[index])
        return torch.cat([part, own] if first else [own, part], dim=dim)

    silent = query.new_zeros(*query.shape[:2], sizes[index], query.shape[3])
    query = torch.cat([silent, query] if first else [query, silent], dim=2)
    if mask is not None and mask.shape[-1] == key.shape[2]:
        # Where all heads or queries see the same one row says it: there is nothing to compare later.
        for dim in range(mask.ndim - 1):
            mask = mask.narrow(dim, 0, 1) if dim and mask.stride(dim) == 0 else mask
        mask = share(mask, mask.ndim - 1)
        if mask.ndim > 1 and mask.shape[-2] == local > 1:
            rows = mask.narrow(-2, 0, 1).expand(*mask.shape[:-2], sizes[index], mask.shape[-1])
            mask = torch.cat([rows, mask] if first else [mask, rows], dim=-2)
    return query, share(key, 2), share(value, 2), mask
