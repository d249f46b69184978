"""Methods of a user's object that a plan looks at as they are called, on the object and on deep copies of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Followed"]

Method = Callable[..., Any]


class Followed:
    """Stands for a method on one object; where the object is deep-copied, the copy's own method is called.

    A plain function in the method's place would be the same one on a copy, and change the original. Pipelines that
    denoise frames at several noise levels keep a copy of their scheduler for each frame.

    Args:
        owner: the object.
        name: of its method.
        around: makes, of the method, what is called instead.
        around_copies: the same for the method of a copy; None leaves it as it is.

    Example:
        >>> import copy
        >>> class Counter:
        ...     count = 0
        ...     def step(self):
        ...         self.count += 1
        >>> counter = Counter()
        >>> counter.step = Followed(counter, "step", lambda method: method)
        >>> twin = copy.deepcopy(counter)
        >>> twin.step()
        >>> counter.count, twin.count
        (0, 1)
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        around: Callable[[Method], Method],
        around_copies: Callable[[Method], Method] | None = None,
    ) -> None:
        original = getattr(owner, name)
        functools.update_wrapper(self, original)
        self._owner, self._name, self._around_copies = owner, name, around_copies
        self._called = around(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what stands in the method's place."""
        return self._called(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._owner))
        if copy is None:
            return self
        # The copy is still empty: this is its class' method.
        method = getattr(copy, self._name)
        if self._around_copies is None:
            return method
        return Followed(copy, self._name, self._around_copies, self._around_copies)
