"""Says how much one operator computes and how much memory it reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["OperatorWork", "work_of"]

aten = torch.ops.aten

#: Rows and columns of what a multiprocessor computes at a time: the usual tile of matrix multiplication kernels.
TILE = 128 * 256
#: Rows of queries that a multiprocessor computes at a time.
QUERY_ROWS = 128


class OperatorWork(NamedTuple):
    """Describes one operator.

    Attributes:
        kind: ``matmul`` (convolutions too), ``attention`` or ``memory``, where arithmetic does not count.
        flops: multiplications and additions.
        bytes: read and written.
        tiles: pieces of its result that can be computed at the same time.
    """

    kind: str
    flops: float
    bytes: int
    tiles: float


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> OperatorWork | None:
    """Returns what an operator does; None for views, which do nothing.

    Args:
        func: the operator.
        args: its arguments; shapes are enough.
        kwargs: its named arguments.
        output: what it returned.
    """
    packet = func.overloadpacket
    if func.is_view or packet in _FREE:
        return None
    results, given = list(_tensors(output)), list(_tensors((args, *kwargs.values())))
    if not results:
        return None
    moved = sum(tensor.nbytes for tensor in (*given, *results))
    if packet in _ATTENTION:
        query, key, value = args[:3]
        *outer, rows, dim = query.shape
        number = math.prod(outer) * rows
        flops = 2.0 * number * key.shape[-2] * (dim + value.shape[-1])
        return OperatorWork("attention", flops, moved, number / QUERY_ROWS)
    if (count := _counts().get(packet)) is not None:
        return OperatorWork("matmul", float(count(*args, **kwargs, out_val=output)), moved, results[0].numel() / TILE)
    if packet in _IN_PLACE and given:
        moved = 2 * given[-1].nbytes
    return OperatorWork("memory", 0.0, moved, 0.0)


@functools.cache
def _counts() -> Mapping[Any, Callable[..., int]]:
    """Returns torch's functions that count arithmetic, by operator."""
    from torch.utils.flop_counter import flop_registry  # imports triton, and a plan may need no tracing

    return flop_registry


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention}
_FREE = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach, aten.lift_fresh}
#: These write over a part of what they are given, as large as the last of their tensors.
_IN_PLACE = {aten.copy_}
