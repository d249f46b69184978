"""Cuts the keys that a language model's cache keeps by the rows of a call, and puts them together again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from partsong.errors import UnsupportedError
from partsong.parallel.protocols import KeptRows
from partsong.parallel.text.cut_calls import LayerCall

__all__ = ["CutKeys", "add_layers", "cache_of"]

#: Layers of transformers' caches that hold keys and values of each row, and nothing else of a row.
_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer", "_CountedLayer")


def cache_of(calls: Sequence[LayerCall]) -> Any:
    """Returns the cache that layers are given; None where they have none."""
    values = (value for given, named in calls for value in (*given, *named.values()))
    return next((value for value in values if isinstance(value, Cache)), None)


class CutKeys:
    """Holds the keys of some layers of a cache in parts, each of which takes the place of all while it is computed.

    Args:
        cache: of transformers; None for none.
        layers: those that this rank computes.
        count: layers of the model.
        rows: of each part.

    Raises:
        UnsupportedError: a layer of the cache, on whatever rank, of a kind that is not known to be cut by rows.
    """

    def __init__(self, cache: Any, layers: Sequence[int], count: int, rows: Sequence[slice]) -> None:
        self.cache, self._whole = cache, dict[int, Any]()
        self._parts: dict[int, list[Any]] = {}
        if cache is None:
            return
        _check(cache, count, rows[-1].stop)
        self._whole = {number: cache.layers[number] for number in layers}
        self._parts = {number: [_some(layer, each) for each in rows] for number, layer in self._whole.items()}

    def take(self, part: int) -> None:
        """Lets the layers of the cache be those of a part."""
        for number, parts in self._parts.items():
            self.cache.layers[number] = parts[part]

    def put_back(self) -> None:
        """Lets them be those of all rows again."""
        for number, layer in self._whole.items():
            self.cache.layers[number] = layer

    def join(self) -> None:
        """Puts into them what their parts hold after the call."""
        for number, layer in self._whole.items():
            _join(layer, self._parts[number])


def add_layers(cache: Any, count: int) -> None:
    """Lets a cache that makes its layers when they are needed have so many."""
    while cache.layer_class_to_replicate is not None and len(cache.layers) < count:
        cache.layers.append(cache.layer_class_to_replicate())


def _check(cache: Any, count: int, total: int) -> None:
    add_layers(cache, count)
    for layer in cache.layers:
        if isinstance(layer, KeptRows):
            known = layer.can_cut(total)
        else:
            known = type(layer).__name__ in _GROWING and (not _has_rows(layer) or len(layer.keys) == total)
        if not known or cache.offloading:
            raise UnsupportedError(f"a cache with {type(layer).__name__} is not cut by rows")


def _some(layer: Any, rows: slice) -> Any:
    if isinstance(layer, KeptRows):
        return layer.some(rows)
    part = copy.copy(layer)
    if _has_rows(layer):
        part.keys, part.values = layer.keys[rows], layer.values[rows]
    return part


def _join(layer: Any, parts: Sequence[Any]) -> None:
    if isinstance(layer, KeptRows):
        layer.join(parts)
    elif parts[-1].is_initialized:
        keys, values = ([getattr(part, name) for part in parts] for name in ("keys", "values"))
        vars(layer).update(vars(parts[-1]))
        layer.keys, layer.values = torch.cat(keys), torch.cat(values)


def _has_rows(layer: Any) -> bool:
    """Says whether it has keys `[B, H, L, D]`: at first it has none, and then a tensor without rows."""
    return isinstance(layer.keys, Tensor) and layer.keys.dim() == 4
