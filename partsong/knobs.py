"""Knobs of strategies, rules, caches and thinking methods: bounds, stated once in annotations, and text form.

A bound stands in the annotation, as in ``num: Count`` or ``window: Annotated[int, Whole(0)] | None``. `check_knobs`
checks the fields of a dataclass, or the arguments of a function, against it. As text, knobs are ``NAME:key=value,...``.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from partsong.errors import ArgumentError

__all__ = [
    "AboveZero",
    "Bound",
    "Count",
    "Knobs",
    "Digits",
    "Number",
    "Share",
    "Whole",
    "by_name",
    "check_fields",
    "check_knobs",
    "check_value",
    "format_knobs",
    "kebab",
    "parse_knobs",
    "read_knobs",
    "type_hints",
]


@runtime_checkable
class Bound(Protocol):
    """Bounds a knob's values in its annotation."""

    def holds(self, value: Any) -> bool:
        """Says whether a value is allowed."""
        ...

    def __str__(self) -> str:
        """Says what is allowed, to go after "use"."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Bounds integers: `low` or more, and at most `high`.

    Attributes:
        low: the least.
        high: the most; None sets no limit.
        why: a reason, shown in the error.

    Example:
        >>> Whole(1).holds(3), Whole(1).holds(True), str(Whole(0, 9))
        (True, False, 'an integer from 0 to 9')
    """

    low: int = 1
    high: int | None = None
    why: str = ""

    def holds(self, value: Any) -> bool:
        """Says whether a value is an integer within the bounds; True and False do not count."""
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return self.low <= value and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        span = "a positive integer" if self.low == 1 else f"an integer of {self.low} or more"
        span = span if self.high is None else f"an integer from {self.low} to {self.high}"
        return f"{span}; {self.why}" if self.why else span


@dataclass(frozen=True, slots=True)
class Number:
    """Bounds finite numbers: from `low` to `high`, or above `low`.

    Attributes:
        low: the least.
        high: the most.
        above: whether `low` itself is left out.
        below: whether `high` itself is left out.

    Example:
        >>> Number(0, 1).holds(0.5), str(Number(0, above=True))
        (True, 'a number above 0')
    """

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: Any) -> bool:
        """Says whether a value is a finite number within the bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        is_left_out = (self.above and value == self.low) or (self.below and value == self.high)
        return self.low <= value <= self.high and not is_left_out

    def __str__(self) -> str:
        start = f"a number above {self.low:g}" if self.above else f"a number from {self.low:g}"
        if math.isfinite(self.high):
            end = f"below {self.high:g}" if self.below else f"up to {self.high:g}"
            return f"{start} and {end}" if self.above or self.below else f"{start} to {self.high:g}"
        return start if self.above else f"a number of {self.low:g} or more"


@dataclass(frozen=True, slots=True)
class Digits:
    """Bounds words: one or more of some characters.

    Attributes:
        allowed: the characters.

    Example:
        >>> Digits("01").holds("0110"), Digits("01").holds(""), str(Digits("01"))
        (True, False, 'a word of the characters 0 and 1, such as 01')
    """

    allowed: str

    def holds(self, value: Any) -> bool:
        """Says whether a value is such a word."""
        return isinstance(value, str) and value != "" and set(value) <= set(self.allowed)

    def __str__(self) -> str:
        return f"a word of the characters {' and '.join(self.allowed)}, such as {self.allowed}"


Count = Annotated[int, Whole(1)]
Share = Annotated[float, Number(0.0, 1.0)]
AboveZero = Annotated[float, Number(0.0, above=True)]


def check_fields(instance: Any) -> None:
    """Checks the fields of a dataclass against their annotations.

    Raises:
        ArgumentError: names the class, the field, its value and what is allowed.

    Example:
        >>> @dataclass
        ... class Patience:
        ...     seconds: AboveZero = 1.0
        >>> check_fields(Patience(seconds=2.5))
    """
    kind = type(instance)
    values = {knob.name: getattr(instance, knob.name) for knob in fields(instance)}
    check_knobs(type_hints(kind), values, owner=f"{kind.__name__}: ")


class Knobs:
    """Checks the fields of a dataclass against their annotations when asked; its base where nothing else is checked."""

    __slots__ = ()

    def validate(self) -> None:
        """Checks the fields.

        Raises:
            ArgumentError: one is out of bounds; names it, its value and what is allowed.
        """
        check_fields(self)


def check_knobs(hints: Mapping[str, Any], values: Mapping[str, Any], owner: str = "") -> None:
    """Checks values against annotations of the same names; names without an annotation pass.

    Args:
        hints: annotations, `Annotated` kept, as `type_hints` gives them.
        values: what was given.
        owner: put in front of the message, such as "Ring: ".

    Raises:
        ArgumentError: names the knob, its value and what is allowed.
    """
    for name, value in values.items():
        if name in hints:
            check_value(name, value, hints[name], owner)


@functools.cache
def type_hints(thing: Any) -> Mapping[str, Any]:
    """Returns the annotations of a class or function by name, `Annotated` kept."""
    return get_type_hints(thing, include_extras=True)


@functools.cache
def _plain_hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def check_value(name: str, value: Any, hint: Any, owner: str = "") -> None:
    """Checks one value against one annotation; see `check_knobs`."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not any(_holds(value, kind) for kind in kinds):
        wanted = " or ".join(_wanted(kind) for kind in kinds if kind is not type(None))
        raise ArgumentError(f"{owner}{name}={value!r}; use {wanted}{', or None' if type(None) in kinds else ''}")
    if is_dataclass(value) and hasattr(value, "validate"):
        value.validate()  # type: ignore[union-attr]


def _holds(value: Any, kind: Any) -> bool:
    """Says whether a value fits one alternative of an annotation; types without bounds accept anything but None."""
    origin = get_origin(kind)
    if origin is Annotated:
        return all(bound.holds(value) for bound in kind.__metadata__ if isinstance(bound, Bound))
    if origin is Literal:
        return value in get_args(kind) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value)
    if kind is bool or (isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "validate")):
        return isinstance(value, kind)
    return value is None if kind is type(None) else value is not None


def _wanted(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return " and ".join(str(bound) for bound in kind.__metadata__ if isinstance(bound, Bound))
    if origin is Literal:
        return _listed(get_args(kind))
    if origin is collections.abc.Callable:
        return "a function"
    if kind is bool:
        return "True or False"
    return f"an instance of {kind.__name__}" if isinstance(kind, type) else str(kind)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    Path: "a name or a path",
    tuple[int, ...]: "numbers such as 3+5 or 8-4-1",
}


def _listed(values: Iterable[Any]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def kebab(name: str) -> str:
    """Spells a class name as command lines do: ``DisplacedPatch`` is ``displaced-patch``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the known one that is most like it, if there is one.

    >>> did_you_mean("ulises", ["ring", "ulysses"])
    '; did you mean ulysses?'
    """
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def by_name(classes: Iterable[type]) -> Mapping[str, Any]:
    """Returns classes by their `kebab` names, in order."""
    return MappingProxyType({kebab(c.__name__): c for c in classes})


def _knob_types(kind: Any) -> dict[str, Any]:
    """Returns the types of a dataclass' fields; class variables are not knobs."""
    hints = _plain_hints(kind)
    return {knob.name: hints[knob.name] for knob in fields(kind)}


def parse_knobs(text: str, classes: Mapping[str, Any], noun: str, plural: str | None = None) -> Any:
    """Reads ``NAME[:key=value,...]`` into an instance, which then validates itself.

    Args:
        text: what was asked for.
        classes: dataclasses with a ``validate`` method, by name.
        noun: what one of them is called, such as "strategy".
        plural: what several are called; None adds an s.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.
    """
    name, values = read_knobs(text, {name: _knob_types(kind) for name, kind in classes.items()}, noun, plural)
    needed = [k.name for k in fields(classes[name]) if k.default is MISSING and k.default_factory is MISSING]
    if left := [key for key in needed if key not in values]:
        raise ArgumentError(f"{noun} {name} needs {', '.join(left)}; write {name}:{left[0]}=...")
    instance = classes[name](**values)
    instance.validate()
    return instance


def read_knobs(
    text: str, known: Mapping[str, Mapping[str, Any]], noun: str, plural: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Reads ``NAME[:key=value,...]`` into the name and the values that the text gives.

    `known` holds for each name the types of its knobs; the rest, and errors, are as in `parse_knobs`.

    Example:
        >>> read_knobs("vote:num=8", {"vote": {"num": int}}, "strategy")
        ('vote', {'num': 8})
    """
    written, _, options = text.partition(":")
    # Pages write the names of classes, and so may command lines.
    name = written if written in known else kebab(written)
    if name not in known:
        near = did_you_mean(name, known)
        raise ArgumentError(
            f"no {noun} {written!r}{f'{near} The' if near else '; the'} {plural or noun + 's'} are {', '.join(known)}"
        )
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in known[name]:
            options = ", ".join(known[name]) or "none"
            raise ArgumentError(f"{noun} {name} has no option {key!r}; its options are {options}")
        if key in values:
            raise ArgumentError(f"{noun} {name}: {key} is given twice")
        values[key] = _read(f"{noun} {name}", known[name][key], key, value)
    return name, values


def format_knobs(value: Any, classes: Mapping[str, Any]) -> str:
    """Writes an instance as `parse_knobs` reads it: ``NAME:key=value,...`` with the knobs that differ from defaults.

    Example:
        >>> from partsong.samplers.text.rules import Quota
        >>> format_knobs(Quota(per_step=4), {"quota": Quota})
        'quota:per_step=4'
    """
    name = next((name for name, kind in classes.items() if type(value) is kind), type(value).__name__)
    knobs = []
    for knob in fields(value):
        set_to = getattr(value, knob.name)
        if knob.default is MISSING or set_to != knob.default:
            text = "+".join(map(str, set_to)) if isinstance(set_to, tuple) else str(set_to)
            knobs.append(f"{knob.name}={text.lower() if isinstance(set_to, bool | None) else text}")
    return f"{name}:{','.join(knobs)}" if knobs else name


def _read(owner: str, types: Any, key: str, text: str) -> Any:
    """Reads a knob's value by its types: a number, a word, ``3+5`` or ``8-4-1`` for several numbers, or ``none``."""
    several = get_origin(types) in (Union, UnionType)
    accepted = set(get_args(types)) if several else {types}
    words = {str(value): value for kind in accepted if get_origin(kind) is Literal for value in get_args(kind)}
    if text in words:
        return words[text]
    if type(None) in accepted and text == "none":
        return None
    if bool in accepted and text in ("true", "false"):
        return text == "true"
    if int in accepted and re.fullmatch(r"-?\d+", text):
        return int(text)
    if float in accepted and re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", text):
        return float(text)
    if str in accepted and re.fullmatch(r"[a-z_]+|\d+", text):
        return text
    if Path in accepted and text:
        return text
    if tuple[int, ...] in accepted and re.fullmatch(r"\d+([+-]\d+)*", text):
        return tuple(map(int, re.split(r"[+-]", text)))
    if words:
        wanted = _listed([*words, *(word for kind, word in _WORDS.items() if kind in accepted)])
        raise ArgumentError(f"{owner}: {key}={text!r}; use {wanted}")
    wanted = " or ".join(word for kind, word in _WORDS.items() if kind in accepted)
    if not wanted:
        raise ArgumentError(f"{owner}: {key}={text!r}; this option has no text form, so set it in Python")
    raise ArgumentError(f"{owner}: {key}={text!r} is not {wanted}")
