"""Remembers what was read out of tensors, since every look at values makes the host wait for a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

__all__ = ["KnownValues", "same_values"]

Fact = TypeVar("Fact")

#: Facts that are remembered at once: those of the steps of a long schedule.
_MOST = 2048


class KnownValues:
    """Remembers facts about the values of tensors that stay as they are, such as the masks of a generation.

    A tensor is known by its memory, so another view of the same numbers is known too, and one that was written to since
    is not. Tensors of inference mode do not tell when they are written to: those are looked at each time.
    """

    def __init__(self) -> None:
        # The tensors are kept: memory that is given back may come again with other values.
        self._facts: OrderedDict[Hashable, tuple[tuple[Tensor, ...], object]] = OrderedDict()

    def of(self, look: Callable[..., Fact], *tensors: Tensor, key: Hashable = None) -> Fact:
        """Returns `look(*tensors)`, which depends on nothing but their values and `key`."""
        places = tuple(map(_place, tensors))
        if None in places:
            return look(*tensors)
        if (places, key) not in self._facts:
            self.put(look(*tensors), *tensors, key=key)
        return self._facts[places, key][1]  # type: ignore[return-value]

    def put(self, fact: object, *tensors: Tensor, key: Hashable = None) -> None:
        """Remembers a fact that was found otherwise, such as those of many tensors by one look at all."""
        places = tuple(map(_place, tensors))
        if None in places:
            return
        self._facts[places, key] = tensors, fact
        if len(self._facts) > _MOST:
            self._facts.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._facts.clear()


def same_values(one: Tensor, other: Tensor) -> bool | None:
    """Says whether two tensors hold the same values; None where only a look at them tells."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    place = _place(one)
    return True if place is not None and place == _place(other) else None


def _place(tensor: Tensor) -> Hashable:
    """Returns what tells a tensor's memory and the state it is in; None where nothing tells it."""
    if tensor.is_inference() or tensor.is_meta or tensor.is_sparse:
        return None
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
