"""Compares the arguments of calls of a model, without reading values where that would make the host wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.known_values import same_values
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.parallel.ranks.later import Later

__all__ = ["ExpectedArguments", "equal_arguments"]

#: Position of a tensor in the arguments of a call: names and indices, outermost first.
Path = tuple[Any, ...]
#: Says whether two tensors of one shape and type, at one position, are equal.
CompareTensors = Callable[[Tensor, Tensor, Path], bool]


class ExpectedArguments:
    """Predicts the arguments of a step's later calls from its first one, and says whether they were right.

    Values are compared at once only in the first steps. From then on an argument that is a new tensor in every step is
    assumed to be as expected, and the comparison's result reaches the host later: an argument that differed after all
    is an error in the next step.

    Args:
        trusts: whether that is assumed at all.
    """

    def __init__(self, *, trusts: bool = True) -> None:
        self._trusts = trusts
        self._moves: dict[tuple[int, Path], bool] = {}
        self._agreed: Counter[tuple[int, Path]] = Counter()
        self._unread: list[tuple[Later, int, list[Path]]] = []

    def reset(self) -> None:
        """Forgets the last generation, after checking its pending comparisons."""
        self.check()
        self._moves.clear()
        self._agreed.clear()

    def of(
        self, branch: int, last: Mapping[str, Any], before: Mapping[str, Any], first: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Guesses a call's arguments: what it shared with the first call in the last step moves on, the rest stays.

        Args:
            branch: number of the call.
            last: its arguments in the last step.
            before: those of the first call there.
            first: those of the first call in this step.
        """

        def shared(one: Tensor, other: Tensor, path: Path) -> bool:
            # A wrong guess only costs time, so the first finding is kept.
            if (branch, path) not in self._moves:
                self._moves[branch, path] = bool(torch.equal(one, other))
            return self._moves[branch, path]

        return {
            name: first.get(name) if equal_arguments(value, before.get(name), shared, (name,)) else value
            for name, value in last.items()
        }

    def have_come(self, branch: int, expected: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
        """Says whether a call has the arguments that were expected of it."""
        unsure: dict[Path, Tensor] = {}

        def trusted(one: Tensor, other: Tensor, path: Path) -> bool:
            key = branch, path
            if self._trusts and self._agreed[key] >= AGREED_STEPS:
                unsure[path] = ((one != other) & ((one == one) | (other == other))).any()
                return True
            is_equal = bool(torch.equal(one, other))
            self._agreed[key] = self._agreed[key] + 1 if is_equal else 0
            return is_equal

        if not equal_arguments(expected, current, trusted):
            self._moves = {key: moves for key, moves in self._moves.items() if key[0] != branch}
            return False
        if unsure:
            self._unread.append((Later(torch.stack(list(unsure.values()))), branch, list(unsure)))
        return True

    def check(self) -> None:
        """Checks the comparisons of the last step.

        Raises:
            UnsupportedError: an argument was not the expected one.
        """
        unread, self._unread = self._unread, []
        for later, branch, paths in unread:
            for differs, path in zip(later.read(), paths, strict=True):
                if differs:
                    raise UnsupportedError(
                        f"CfgParallel: in the last step, call {branch + 1} of the model had another "
                        f"{'.'.join(map(str, path))} than in earlier steps, which made this generation wrong; "
                        "leave CfgParallel out"
                    )


def _by_values(one: Tensor, other: Tensor, path: Path) -> bool:
    return bool(torch.equal(one, other))


def equal_arguments(one: Any, other: Any, compare: CompareTensors = _by_values, path: Path = ()) -> bool:
    """Says whether two arguments of a model are the same, to the last bit of every tensor in them.

    Args:
        one: an argument, or all by name.
        other: the same.
        compare: called where only the values decide.
        path: where they stand.
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        known = same_values(one, other)
        return compare(one, other, path) if known is None else known
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            equal_arguments(value, other[name], compare, (*path, name)) for name, value in one.items()
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=False))
        return len(one) == len(other) and all(equal_arguments(*pair, compare, (*path, place)) for place, pair in pairs)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)
