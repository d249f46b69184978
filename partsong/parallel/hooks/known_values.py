"""Remembers values that were read from tensors, since every read makes the host wait for a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

__all__ = ["KnownValues", "place_for_memory", "place_of", "same_values"]

Fact = TypeVar("Fact")

#: Most facts that are remembered: enough for the steps of a long schedule.
_MOST = 2048


class KnownValues:
    """Remembers facts about the values of constant tensors, such as the masks of a generation.

    A tensor is identified by its memory, so another view of the same numbers is known too, but not one that was written
    to since. Tensors of inference mode do not record writes, so they are read each time.
    """

    def __init__(self) -> None:
        # The tensors are kept alive: freed memory may be reused with other values.
        self._facts: OrderedDict[Hashable, tuple[tuple[Tensor, ...], object]] = OrderedDict()

    def of(self, look: Callable[..., Fact], *tensors: Tensor, key: Hashable = None) -> Fact:
        """Returns `look(*tensors)`, which depends on nothing but their values and `key`."""
        places = tuple(map(place_of, tensors))
        if None in places:
            return look(*tensors)
        if (places, key) not in self._facts:
            self.put(look(*tensors), *tensors, key=key)
        return self._facts[places, key][1]  # type: ignore[return-value]

    def put(self, fact: object, *tensors: Tensor, key: Hashable = None) -> None:
        """Remembers a fact that was computed elsewhere, such as the facts of many tensors computed in one pass."""
        places = tuple(map(place_of, tensors))
        if None in places:
            return
        self._facts[places, key] = tensors, fact
        if len(self._facts) > _MOST:
            self._facts.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._facts.clear()


def same_values(one: Tensor, other: Tensor) -> bool | None:
    """Says whether two tensors hold the same values; None where only reading them would show it."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    place = place_of(one)
    return True if place is not None and place == place_of(other) else None


def place_of(tensor: Tensor) -> Hashable:
    """Returns a key for a tensor's memory and version; None where it has none."""
    if tensor.is_inference() or tensor.is_meta or tensor.is_sparse:
        return None
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def place_for_memory(tensor: Tensor) -> Hashable:
    """Returns `place_of` a tensor, and a key for its memory alone where it has no values, as in forecasts of memory."""
    if not tensor.is_meta:
        return place_of(tensor)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
