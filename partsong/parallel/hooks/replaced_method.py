"""Replaces methods of a user's object, and restores them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from partsong.errors import UnsupportedError

__all__ = ["Method", "ReplacedMethods", "replace_method"]

Method = Callable[..., Any]
#: Takes a method and returns the function to call instead.
Around = Callable[[Method], Method]


class ReplacedMethods:
    """Keeps the methods that one plan has replaced."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, around: Around, around_copies: Around | None = None) -> None:
        """Replaces a method of one object until `restore`; see `replace_method`.

        Raises:
            UnsupportedError: another plan has replaced that method of the object.
        """
        before = vars(owner).get(name)
        if isinstance(before, _Replacement):
            raise UnsupportedError(
                f"this {type(owner).__name__} is under another plan already; call undo() on that plan first"
            )
        replace_method(owner, name, around, around_copies)
        self._replaced.append((owner, name, before))

    def holds(self, owner: Any) -> bool:
        """Says whether a method of an object is replaced."""
        return any(held is owner for held, _, _ in self._replaced)

    def restore(self, only: Any = None) -> None:
        """Restores what was there before, last first; of one object only where one is given."""
        for owner, name, before in reversed(self._replaced):
            if only is not None and owner is not only:
                continue
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._replaced = [] if only is None else [each for each in self._replaced if each[0] is not only]


def replace_method(owner: Any, name: str, around: Around, around_copies: Around | None = None) -> None:
    """Replaces a method of one object; deep copies of the object get their own method.

    A plain function in the method's place would be shared by a copy, and would change the original. Pipelines that
    denoise frames at several noise levels keep a copy of their scheduler for each frame.

    Args:
        owner: the object.
        name: name of its method.
        around: takes the method and returns the function to call instead.
        around_copies: the same for the method of a copy; None leaves it unchanged.

    Example:
        >>> import copy
        >>> class Counter:
        ...     count = 0
        ...     def step(self):
        ...         self.count += 1
        >>> counter = Counter()
        >>> replace_method(counter, "step", lambda method: method)
        >>> copied = copy.deepcopy(counter)
        >>> copied.step()
        >>> counter.count, copied.count
        (0, 1)
    """
    # This bypasses the object's own __setattr__, by which a pipeline would add the method to its configuration.
    vars(owner)[name] = _Replacement(owner, name, around, around_copies)


class _Replacement:
    """Stands in for a method of one object, and becomes the copy's own method on a deep copy of it."""

    def __init__(self, owner: Any, name: str, around: Around, around_copies: Around | None) -> None:
        original = getattr(owner, name)
        functools.update_wrapper(self, original)
        self._owner, self._name, self._around_copies = owner, name, around_copies
        self._called = around(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._owner))
        if copy is None:
            return self
        if self._around_copies is None:
            # The copy has no attributes yet, so this is its class' method.
            return getattr(copy, self._name)
        return _Replacement(copy, self._name, self._around_copies, self._around_copies)
