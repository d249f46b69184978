"""Joins similar calls of one model into a single call, and splits the result again."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partsong.parallel.adapters import Adapter
from partsong.parallel.hooks.known_values import KnownValues
from partsong.parallel.hooks.samples import sample_of

__all__ = ["JoinedCalls"]


class JoinedCalls:
    """Joins the arguments of a denoiser's calls along the batch.

    Guidance batches its branches one after the other, and strategies may share them out. So the joined batch holds
    first the first branch of every call, then the second of every call.

    Args:
        adapter: the row of the denoiser; arguments that it does not mark as batched must be equal in all calls.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._batched = frozenset((*adapter.batched, adapter.timestep))
        special = (
            *adapter.per_sample,
            *adapter.first,
            *adapter.numbered,
            *adapter.layered,
            *adapter.padded,
            *adapter.residuals,
        )
        folded = () if adapter.frames is None else adapter.frames.folded
        self._special = frozenset((*special, *folded))
        self._digests = KnownValues()

    def shape(self, named: Mapping[str, Any], num: int) -> Hashable:
        """Returns what two calls must have in common to be joined; None for a call that cannot be joined.

        Args:
            named: arguments of the call, by name.
            num: pictures of the call.
        """
        rows = len(named[self._adapter.sample])
        given = {name: value for name, value in named.items() if value is not None}
        if rows % num or self._special & set(given) or self._adapter.inferred:
            return None
        parts = tuple(
            (name, self._row_shape(value, rows) if name in self._batched else self._shared(value))
            for name, value in sorted(given.items())
        )
        return None if any(part is None for _, part in parts) else (rows // num, parts)

    def join(self, calls: Sequence[Mapping[str, Any]], nums: Sequence[int]) -> dict[str, Any]:
        """Returns the arguments of one call for several of the same `shape`.

        Args:
            calls: their arguments.
            nums: their numbers of pictures.
        """
        first = calls[0]
        branches = len(first[self._adapter.sample]) // nums[0]
        joined = {}
        for name, value in first.items():
            if name in self._batched and value is not None:
                joined[name] = _joined([call[name] for call in calls], nums, branches)
            else:
                joined[name] = value
        return joined

    def part(self, output: Any, nums: Sequence[int], index: int) -> Any:
        """Returns what call number `index` of the joined ones would have returned.

        Args:
            output: of the joined call.
            nums: numbers of pictures of the calls.
            index: of the call.
        """
        sample, total = sample_of(output), sum(nums)
        start = sum(nums[:index])
        part = torch.cat([branch[start : start + nums[index]] for branch in sample.split(total)])
        return (part, *output[1:]) if isinstance(output, tuple) else type(output)(sample=part)

    def _row_shape(self, value: Any, rows: int) -> Hashable:
        """Returns the shape of a row of an argument; None where it is unclear which rows belong to which sample."""
        if isinstance(value, Mapping):
            inner = {key: self._row_shape(item, rows) for key, item in sorted(value.items()) if item is not None}
            return None if None in inner.values() else tuple(inner.items())
        if isinstance(value, (int, float)):
            return "number"
        if not isinstance(value, Tensor):
            return None
        if value.ndim == 0:
            return ("number", value.dtype)
        if value.ndim == 1 and len(value) == 1:
            return ("number", value.dtype) if rows > 1 else ((), value.dtype)
        return (tuple(value.shape[1:]), value.dtype) if len(value) == rows else None

    def _shared(self, value: Any) -> Hashable:
        """Returns a key that distinguishes values of an argument that all samples share."""
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.dtype, self._digests.of(_digest, value))
        if isinstance(value, Mapping):
            return tuple((key, self._shared(item)) for key, item in sorted(value.items()))
        if isinstance(value, (list, tuple)):
            return tuple(self._shared(item) for item in value)
        return value if isinstance(value, Hashable) else None


def _joined(values: Sequence[Any], nums: Sequence[int], branches: int) -> Any:
    if isinstance(values[0], Mapping):
        keys = [key for key, item in values[0].items() if item is not None]
        return {key: _joined([value[key] for value in values], nums, branches) for key in keys}
    rows = [_rows(value, num * branches) for value, num in zip(values, nums, strict=True)]
    parts = [row.split(num) for row, num in zip(rows, nums, strict=True)]
    return torch.cat([part[branch] for branch in range(branches) for part in parts])


def _rows(value: Any, rows: int) -> Tensor:
    """Repeats for every row a value that serves all, such as the timestep."""
    if not isinstance(value, Tensor):
        return torch.full((rows,), value)
    value = value.reshape(1) if value.ndim == 0 else value
    return value.expand(rows, *value.shape[1:]) if len(value) == 1 else value


def _digest(value: Tensor) -> bytes:
    plain = value.detach().cpu().contiguous()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").digest()
