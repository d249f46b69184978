"""Compares a model's calls with those a step before: a GPU's graph can only repeat what is the same in each of them.

A graph repeats kernels with the numbers and the addresses of the call that it was captured from. So a call must make
the same operators with the same Python numbers each time, and what it keeps for the next one must stay where it is.
Messages are left out: they lie between graphs.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["RepeatedCalls"]


@dataclass
class _Call:
    """Holds what one call did.

    Attributes:
        operators: each operator's name, with its Python numbers and the shapes of its tensors.
        kept: for each operator, the memory it reads or writes that an earlier call made.
    """

    operators: list[tuple[Any, ...]] = field(default_factory=list)
    kept: list[tuple[Any, ...]] = field(default_factory=list)


class RepeatedCalls(TorchDispatchMode):
    """Records what every call of some modules does while it is entered."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules, self.calls = modules, list[_Call]()
        self._is_inside = False
        self._born: dict[int, tuple[int, int]] = {}  # memory made in a call: which call, and how many were before it
        self._made = 0
        self._watched: set[Any] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records while entered."""
        hooks = []
        for module in self.modules:
            hooks.append(module.register_forward_pre_hook(self._begin))
            hooks.append(module.register_forward_hook(self._end))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def differences(self, steps: int) -> tuple[int | None, int | None]:
        """Compares the last call of a generation's last step but one with its counterpart a step before.

        In the last step nothing is sent for a next one.

        Args:
            steps: how many the generation had; each has equally many calls.

        Returns:
            Operators that are not the same, and those whose kept memory lies elsewhere; None where no call was whole.
        """
        each = len(self.calls) // steps
        if not each:
            return None, None
        last, before = self.calls[-1 - each], self.calls[-1 - 2 * each]
        changed = _unlike(last.operators, before.operators)
        return changed, 0 if changed else _unlike(last.kept, before.kept)

    def _begin(self, *call: Any) -> None:
        self._is_inside = True
        self.calls.append(_Call())

    def _end(self, *call: Any) -> None:
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._is_inside:
            self._note(func, tree_leaves((args, kwargs or {})), tree_leaves(output))
        return output

    def _note(self, func: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        call, number = self.calls[-1], len(self.calls)
        if func.namespace == "c10d":
            return
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        plain = [(*leaf.shape,) if isinstance(leaf, Tensor) else str(leaf) for leaf in given]
        call.operators.append((str(func), *plain))
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        known = [self._born[key] for key in storages if key in self._born]
        call.kept.append(tuple(place for maker, place in known if maker < number))
        for leaf in made:
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in {*storages, *self._born}:
                self._made += (
                    1  # what is made anew is new, even where the memory of something that is gone is used again
                )
                self._born[key] = number, self._made
                self._watched.add(weakref.ref(leaf.untyped_storage(), lambda watch, key=key: self._forget(watch, key)))

    def _forget(self, watch: Any, key: int) -> None:
        self._watched.discard(watch)
        self._born.pop(key, None)


def _unlike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Counts what has to be changed, left out or put in to make one list of the other."""
    parts = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(end - start, stop - begin) for tag, start, end, begin, stop in parts if tag != "equal")
