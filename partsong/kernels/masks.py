"""Says which query may see which key, as data: kernels work it out from positions and ids, no `[Lq, Lk]` is stored.

Query i has position ``i + offset``, key j at position j (in a `Segment`, at ``segment.position + j``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError

__all__ = ["SHARED", "BlockCausal", "ChosenBlocks", "Causal", "Mask", "Streams", "Tree", "describe"]

#: Stream id of keys that every stream sees: a shared prefix.
SHARED = -1


@dataclass(frozen=True, slots=True)
class Causal:
    """Lets a query see the keys at its own position and before.

    Args:
        offset: position of the first query; decoding the last tokens of Lk keys has ``offset = Lk - Lq``.

    Example:
        >>> Causal(offset=2).dense(2, torch.arange(4)).int().tolist()
        [[[[1, 1, 1, 0], [1, 1, 1, 1]]]]
    """

    offset: int = 0

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raises unless the mask fits a call of these sizes."""
        _whole("Causal", "offset", self.offset)

    def dense(self, num_queries: int, positions: Tensor, streams: Tensor | None = None) -> Tensor:
        """Writes the mask out for keys at `positions`: bool `[1, 1, Lq, Lk]`, True = attend."""
        return (positions[None, :] <= _queries(self.offset, num_queries, positions))[None, None]

    def keys(self, where: Any) -> Causal:
        """Returns the mask for some of the keys, a slice or indices; positions come with the keys."""
        return self


@dataclass(frozen=True, slots=True)
class BlockCausal:
    """Lets blocks see themselves, in both directions, and the blocks before: block diffusion language models.

    Args:
        block: positions per block, at least 1.
        offset: position of the first query, at least 0.

    Source: Block Diffusion, arXiv 2503.09573.
    """

    block: int
    offset: int = 0

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raises unless the mask fits a call of these sizes."""
        _whole("BlockCausal", "block", self.block, least=1)
        _whole("BlockCausal", "offset", self.offset, least=0)

    def dense(self, num_queries: int, positions: Tensor, streams: Tensor | None = None) -> Tensor:
        """Writes the mask out for keys at `positions`: bool `[1, 1, Lq, Lk]`, True = attend."""
        queries = _queries(self.offset, num_queries, positions)
        return (positions[None, :] // self.block <= queries // self.block)[None, None]

    def keys(self, where: Any) -> BlockCausal:
        """Returns the mask for some of the keys, a slice or indices; positions come with the keys."""
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Lets a query see a shared prefix and the keys of its own stream: parallel threads.

    Args:
        query: stream id >= 0 of each query, integer `[Lq]` or `[B, Lq]`.
        key: stream id of each key, integer `[Lk]` or `[B, Lk]`, `SHARED` for those everybody sees; None where the
            keys come in segments, which carry their `stream`.
        offset: additionally causal by position, as `Causal(offset)`; None is bidirectional.

    Source: the masks of ParaThinker, arXiv 2509.04475, and Multiverse, arXiv 2506.09991.
    """

    query: Tensor
    key: Tensor | None = None
    offset: int | None = None

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raises unless the mask fits a call of these sizes."""
        _ids("Streams", "query", self.query, batch, num_queries)
        if self.key is not None:
            _ids("Streams", "key", self.key, batch, num_keys)
        if self.offset is not None:
            _whole("Streams", "offset", self.offset)

    def dense(self, num_queries: int, positions: Tensor, streams: Tensor | None = None) -> Tensor:
        """Writes the mask out: bool `[B or 1, 1, Lq, Lk]`, True = attend; `streams` stand in for a `key` of None."""
        key = _rows(streams if self.key is None else self.key, positions)[:, None]
        keep = (key == SHARED) | (key == _rows(self.query, positions)[:, :, None])
        if self.offset is not None:
            keep = keep & (positions[None, :] <= _queries(self.offset, num_queries, positions))
        return keep[:, None]

    def keys(self, where: Any) -> Streams:
        """Returns the mask for some of the keys, a slice or indices."""
        return self if self.key is None else replace(self, key=self.key[..., where])


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Lets a query see its ancestors and itself: branching search and speculative trees in one pass.

    Nodes are numbered in depth-first order: ``enter`` when the walk reaches a node, ``leave`` one past the last
    ``enter`` below it. A key is an ancestor of a query if ``enter[key] <= query < leave[key]``.

    Args:
        query: ``enter`` of each query's node, integer `[Lq]` or `[B, Lq]`.
        enter: ``enter`` of each key's node, `[Lk]` or `[B, Lk]`; 0 for a prefix that is above all nodes.
        leave: ``leave`` of each key's node, of the same shape.

    Source: tree attention, SpecInfer, arXiv 2305.09781, as an interval test.
    """

    query: Tensor
    enter: Tensor
    leave: Tensor

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raises unless the mask fits a call of these sizes."""
        _ids("Tree", "query", self.query, batch, num_queries)
        _ids("Tree", "enter", self.enter, batch, num_keys)
        _ids("Tree", "leave", self.leave, batch, num_keys)

    def dense(self, num_queries: int, positions: Tensor, streams: Tensor | None = None) -> Tensor:
        """Writes the mask out: bool `[B or 1, 1, Lq, Lk]`, True = attend."""
        query = _rows(self.query, positions)[:, :, None]
        enter, leave = (_rows(x, positions)[:, None] for x in (self.enter, self.leave))
        return ((enter <= query) & (query < leave))[:, None]

    def keys(self, where: Any) -> Tree:
        """Returns the mask for some of the keys, a slice or indices."""
        return replace(self, enter=self.enter[..., where], leave=self.leave[..., where])


@dataclass(frozen=True, slots=True, eq=False)
class ChosenBlocks:
    """Lets each block of queries see the blocks of keys that were chosen for it: block-sparse attention.

    The keys come as one tensor, not in segments. Time goes with the number of chosen blocks.

    Args:
        chosen: bool `[B or 1, Hq or 1, query blocks, key blocks]`, True = attend.
        size: tokens of a block, at least 1; the last block may be shorter.

    Example:
        >>> mask = ChosenBlocks(torch.tensor([[[[True, False], [True, True]]]]), size=2)
        >>> mask.dense(3, torch.arange(4)).int().tolist()
        [[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]]]
    """

    chosen: Tensor
    size: int = 64

    def check(self, batch: int, num_queries: int, num_keys: int) -> None:
        """Raises unless the mask fits a call of these sizes."""
        _whole("ChosenBlocks", "size", self.size, least=1)
        if not isinstance(self.chosen, Tensor) or self.chosen.dtype is not torch.bool or self.chosen.ndim != 4:
            raise ArgumentTypeError(
                f"ChosenBlocks needs chosen to be a bool tensor of 4 dims, found {describe(self.chosen)}"
            )
        wanted = tuple(-(-length // self.size) for length in (num_queries, num_keys))
        if self.chosen.shape[0] not in (1, batch) or tuple(self.chosen.shape[2:]) != wanted:
            raise ArgumentError(
                f"ChosenBlocks: chosen {tuple(self.chosen.shape)} is not [{batch} or 1, Hq or 1, {wanted[0]}, "
                f"{wanted[1]}], the blocks of {self.size} of {num_queries} queries and {num_keys} keys"
            )

    def dense(self, num_queries: int, positions: Tensor, streams: Tensor | None = None) -> Tensor:
        """Writes the mask out: bool `[B or 1, Hq or 1, Lq, Lk]`, True = attend."""
        rows = torch.arange(num_queries, device=positions.device) // self.size
        return self.chosen[:, :, rows][..., torch.arange(len(positions), device=positions.device) // self.size]

    def keys(self, where: Any) -> ChosenBlocks:
        """Returns the mask itself: its keys are one tensor, of which all are used."""
        return self


Mask = Causal | BlockCausal | Streams | Tree | ChosenBlocks
KINDS: tuple[Any, ...] = (Causal, BlockCausal, Streams, Tree, ChosenBlocks)


def describe(x: object) -> str:
    """Describes a wrong argument: a tensor of some dtype, or a type."""
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def _queries(offset: int, num_queries: int, like: Tensor) -> Tensor:
    return torch.arange(offset, offset + num_queries, device=like.device)[:, None]


def _rows(ids: Tensor | None, like: Tensor) -> Tensor:
    assert ids is not None
    return torch.atleast_2d(ids).to(like.device)


def _whole(kind: str, name: str, value: object, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ArgumentError(f"{kind} needs {name} to be an integer{bound}, found {value!r}")


def _ids(kind: str, name: str, ids: object, batch: int, length: int) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"{kind} needs {name} to be an int32 or int64 tensor, found {describe(ids)}")
    if tuple(ids.shape) not in ((length,), (1, length), (batch, length)):
        raise ArgumentError(f"{kind}: {name} {tuple(ids.shape)} is neither [{length}] nor [{batch}, {length}]")
