"""Frozen dataclasses as text, ``NAME:key=value,...``: strategies, rules and caches on command lines and in reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from partsong.errors import ArgumentError

__all__ = ["by_name", "format_knobs", "kebab", "parse_knobs"]

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple[int, ...]: "numbers such as 3+5 or 8-4-1",
}


def kebab(name: str) -> str:
    """A class name as command lines spell it: ``DisplacedPatch`` is ``displaced-patch``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def by_name(classes: Iterable[type]) -> Mapping[str, Any]:
    """Classes by their `kebab` names, in order."""
    return MappingProxyType({kebab(c.__name__): c for c in classes})


def parse_knobs(text: str, classes: Mapping[str, Any], noun: str) -> Any:
    """Reads ``NAME[:key=value,...]`` into an instance, which then validates itself.

    Args:
        text: what was asked for.
        classes: dataclasses with a ``validate`` method, by name.
        noun: what they are, with its plural: "strategy strategies".

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.
    """
    one, many = noun.split(" ")
    name, _, options = text.partition(":")
    if name not in classes:
        raise ArgumentError(f"no {one} {name!r}; the {many} are {', '.join(classes)}")
    knobs = [knob.name for knob in fields(classes[name])]
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in knobs:
            raise ArgumentError(f"{one} {name} has no option {key!r}; its options are {', '.join(knobs) or 'none'}")
        if key in values:
            raise ArgumentError(f"{one} {name}: {key} is given twice")
        values[key] = _read(f"{one} {name}", get_type_hints(classes[name])[key], key, value)
    needed = [k.name for k in fields(classes[name]) if k.default is MISSING and k.default_factory is MISSING]
    if left := [key for key in needed if key not in values]:
        raise ArgumentError(f"{one} {name} needs {', '.join(left)}; write {name}:{left[0]}=...")
    made = classes[name](**values)
    made.validate()
    return made


def format_knobs(value: Any, classes: Mapping[str, Any]) -> str:
    """Writes an instance as `parse_knobs` reads it: ``NAME:key=value,...`` with the knobs that are not the default.

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
    """A knob's value: a number where it takes numbers, a word for words, ``3+5`` or ``8-4-1`` for several, ``none``."""
    accepted = set(get_args(types)) if not isinstance(types, type) and get_origin(types) is not tuple else {types}
    if get_origin(types) is Literal:
        if text in accepted:
            return text
        raise ArgumentError(f"{owner}: {key}={text!r}; use {' or '.join(sorted(map(str, accepted)))}")
    if type(None) in accepted and text == "none":
        return None
    if bool in accepted and text in ("true", "false"):
        return text == "true"
    if int in accepted and re.fullmatch(r"-?\d+", text):
        return int(text)
    if float in accepted and re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", text):
        return float(text)
    if str in accepted and re.fullmatch(r"[a-z_]+", text):
        return text
    if tuple[int, ...] in accepted and re.fullmatch(r"\d+([+-]\d+)*", text):
        return tuple(map(int, re.split(r"[+-]", text)))
    wanted = " or ".join(words for kind, words in _WORDS.items() if kind in accepted)
    raise ArgumentError(f"{owner}: {key}={text!r} is not {wanted}")
