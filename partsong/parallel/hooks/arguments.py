"""Names the arguments of a module's calls, and passes them on the way they came: positions stay positions.

Wrappers of a model's forward read keyword arguments where a pipeline passes them, such as the scale of a LoRA. So a
hook may look at all arguments by name and change them, but must not turn one kind into the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

__all__ = ["ArgumentNames", "AsCalled"]

_POSITIONS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class ArgumentNames:
    """Names the arguments of calls with one signature. Binding a signature for every block of a model takes longer.

    Args:
        signature: of the forward, without ``self``.

    Example:
        >>> def forward(x, t, scale=1.0): ...
        >>> names = ArgumentNames(inspect.signature(forward))
        >>> names.of((1, 2), {"scale": 0.5}), names.positions((1, 2))
        ({'x': 1, 't': 2, 'scale': 0.5}, ('x', 't'))
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature, kinds = signature, signature.parameters.values()
        self._places = tuple(each.name for each in kinds if each.kind in _POSITIONS)
        self._rest = next((each.name for each in kinds if each.kind is Parameter.VAR_POSITIONAL), None)
        self._order = tuple(each.name for each in kinds if each.kind is not Parameter.VAR_KEYWORD)
        required = (each.name for each in kinds if each.default is Parameter.empty and each.kind not in _OPEN)
        self._required = frozenset(required)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the given arguments by name, in the signature's order; those it does not name come last.

        What goes beyond the positions is a tuple under the name of the signature's ``*args``.

        Raises:
            TypeError: the call does not fit the signature.
        """
        named = dict(zip(self._places, args, strict=False))
        count = len(named)
        if kwargs:
            together = named | dict(kwargs)
            named = {name: together[name] for name in self._order if name in together} | together
        if len(args) > count and self._rest is not None:
            named[self._rest] = tuple(args[count:])
        elif len(args) > count or len(named) < count + len(kwargs) or not self._required <= named.keys():
            self.signature.bind(*args, **kwargs)  # says what is wrong
        return named

    def positions(self, args: Sequence[Any]) -> tuple[str, ...]:
        """Returns the names of what was passed by position."""
        beyond = (self._rest,) if self._rest is not None and len(args) > len(self._places) else ()
        return (*self._places[: len(args)], *beyond)

    def passed(self, named: Mapping[str, Any], positions: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments by position and by keyword; one that is missing makes keywords of those after it."""
        args, kwargs = list[Any](), dict(named)
        for name in positions:
            if name not in kwargs:
                break
            value = kwargs.pop(name)
            args += value if name == self._rest else (value,)
        return tuple(args), kwargs


class AsCalled:
    """Calls a function with arguments by name, and passes those by position that came by position.

    Args:
        function: what to call.
        names: names its arguments.
        positions: the names of those to pass by position.
    """

    def __init__(self, function: Callable[..., Any], names: ArgumentNames, positions: Sequence[str]) -> None:
        self.function, self.names, self.positions = function, names, positions

    def __call__(self, **named: Any) -> Any:
        """Calls the function."""
        args, kwargs = self.names.passed(named, self.positions)
        return self.function(*args, **kwargs)
