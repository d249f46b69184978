"""Counts the bytes of tensors that are alive while code runs, with or without values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators create while it is entered, until their last reference is gone.

    Args:
        known: tensors that existed before and do not count.

    Attributes:
        now: bytes alive now.
        peak: most bytes alive at a time.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in known}
        self._watched: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        size = storage.nbytes()
        self._held.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        self._watched.add(weakref.ref(storage, lambda watch: self._forget(watch, key, size)))

    def _forget(self, watch: Any, key: int, size: int) -> None:
        self._watched.discard(watch)
        self._held.discard(key)
        self.now -= size
