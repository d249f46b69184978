"""Describes one self-attention over split tokens, and the chain of stages it goes through.

Self-attention goes through a chain of stages, one per mesh axis, outermost call first: `Ulysses` swaps tokens for
heads, then `Ring` or `DisplacedPatch` brings the keys and values, then one kernel computes. Keys may arrive in any
token order: attention does not depend on it, since positions are in the keys already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from partsong.kernels import ChosenBlocks, attention
from partsong.kernels.attend import attend_block
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.block_rule import BlockRule
from partsong.parallel.ranks.mesh import TOKEN_AXES, Axis
from partsong.parallel.ranks.ranges import named_range

__all__ = [
    "TOKEN_AXES",
    "AttentionCall",
    "AttentionShape",
    "Inner",
    "Runs",
    "Stage",
    "attend_locally",
    "attend_through",
    "mask_rows",
    "masked_attention",
    "merged_runs",
    "predict_through",
    "shard_runs",
]

#: Computes the rest of an attention, after a stage has moved its part.
Inner = Callable[["AttentionCall"], Tensor]

#: The tokens of one shard in order, as runs of one stream each: (stream, tokens).
Runs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Describes one self-attention of one rank.

    Attributes:
        layer: index of the attention module in its model.
        q: queries `[B, Hq, L, D]` of the tokens this rank holds.
        k: their keys `[B, Hkv, L, D]`.
        v: their values.
        sizes: tokens of every shard that is still separate, in order.
        index: the one that this rank holds.
        masks: for each shard its key mask `[B, 1, 1, L]` (bool keeps True; float is added); None masks nothing. Where
            queries see different keys it has a row for each query here, `[B, 1, Lq, L]`.
        scale: logit scale; None is ``D ** -0.5``.
        wave: which part of the layer's heads this is, where a stage distributes them.
        runs: the streams of every shard's tokens; empty where all are one run of image tokens.
        whole_mask: the mask of all queries and keys `[B, 1, L, L]`, shard after shard, where queries see different
            keys; otherwise None.
        rule: chooses the blocks of keys that a block of queries sees; None lets all see all.
        chosen: what it chose `[B, Hq, query blocks, key blocks]`, for the queries and keys here, once that is known.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    sizes: tuple[int, ...]
    index: int
    masks: tuple[Tensor, ...] | None = None
    scale: float | None = None
    wave: int = 0
    runs: tuple[Runs, ...] = ()
    whole_mask: Tensor | None = None
    rule: BlockRule | None = None
    chosen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Holds the sizes that decide how many bytes one self-attention moves; names are those of `AttentionCall`.

    Attributes:
        block: tokens of a block of keys, where blocks are chosen; 0 where all see all.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    sizes: tuple[int, ...]
    index: int
    step: int = 0
    is_last: bool = False
    layer: int = 0
    runs: tuple[Runs, ...] = ()
    block: int = 0


def shard_runs(of: AttentionCall | AttentionShape) -> tuple[Runs, ...]:
    """Returns the streams of every shard's tokens.

    Example:
        >>> shard_runs(AttentionShape(1, 1, 1, 8, 4, sizes=(3, 2), index=0))
        ((('image', 3),), (('image', 2),))
    """
    return of.runs or tuple(((IMAGE, size),) for size in of.sizes)


def merged_runs(runs: tuple[Runs, ...], size: int) -> tuple[Runs, ...]:
    """Joins the runs of shards `size` by `size`, in order."""
    return tuple(sum(runs[start : start + size], ()) for start in range(0, len(runs), size))


def mask_rows(whole: Tensor, sizes: Sequence[int], index: int) -> tuple[Tensor, ...]:
    """Returns the part of a whole mask for the queries of one shard: a mask for the keys of every shard.

    Args:
        whole: `[B, 1, L, L]`, shard after shard.
        sizes: tokens of every shard.
        index: the shard whose queries they are.
    """
    return whole.split(list(sizes), dim=2)[index].split(list(sizes), dim=3)


class Stage(Protocol):
    """Describes one link of the attention chain; implementations inherit its defaults."""

    axis: Axis
    #: Whether it runs calls in which blocks of keys are chosen.
    takes_blocks: bool = False

    def run(self, call: AttentionCall, inner: Inner) -> Tensor:
        """Computes the attention of the call's queries to all keys; `inner` does the rest of the work."""
        ...

    def predict(self, shape: AttentionShape) -> tuple[int, tuple[AttentionShape, ...]]:
        """Returns the bytes this rank sends in one attention, and the shape of each call that `inner` gets."""
        ...

    @property
    def bytes_once(self) -> int:
        """Counts the bytes this rank has sent once in this generation, besides those of its attentions."""
        return 0

    def kept(self) -> str | None:
        """Says what this rank keeps from one step to the next, and its memory; None where it is nothing."""
        return None

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error; most stages keep none."""


def attend_through(stages: Sequence[Stage], call: AttentionCall) -> Tensor:
    """Computes attention through a chain of stages, outermost first, which ends at the local keys."""
    if not stages:
        return attend_locally(call)
    with named_range(f"{type(stages[0]).__name__} of layer {call.layer}"):
        return stages[0].run(call, lambda inner: attend_through(stages[1:], inner))


def predict_through(stages: Sequence[Stage], shape: AttentionShape) -> int:
    """Returns the bytes that one attention through a chain of stages moves."""
    if not stages:
        return 0
    sent, shapes = stages[0].predict(shape)
    return sent + sum(predict_through(stages[1:], inner) for inner in shapes)


def attend_locally(call: AttentionCall) -> Tensor:
    """Computes attention to the local keys, at the end of the chain."""
    if call.rule is not None:
        assert call.chosen is not None, "the stage that joined all keys has chosen"
        return attention(call.q, call.k, call.v, mask=ChosenBlocks(call.chosen, call.rule.size), scale=call.scale)[0]
    mask = None if call.masks is None else torch.cat(call.masks, dim=-1)
    return masked_attention(call.q, call.k, call.v, mask, call.scale)[0]


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Calls `kernels.attention` with a mask that is boolean or additive."""
    if mask is None:
        return attend_block(q, k, v, scale=scale)
    is_bias = mask.dtype != torch.bool
    return attention(q, k, v, mask=None if is_bias else mask, bias=mask if is_bias else None, scale=scale)
