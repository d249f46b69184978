"""Cuts texts as evaluation harnesses ask, and names the settings that both models of lm-eval know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partsong.errors import ArgumentError
from partsong.reasoning.calls.thoughts import THINK_TAGS, answer_start, first_stop

__all__ = ["ROOM", "check_options", "cut", "room_of", "stops_of"]

#: The harness's names for the most tokens to write; the first that is given counts.
ROOM = ("max_gen_toks", "max_new_tokens", "max_tokens")


def cut(text: str, stops: Sequence[str], prompt: str = "") -> str:
    """Returns a text up to the first of its stopping texts; in hidden reasoning before the answer they do not count.

    Args:
        text: what the model wrote.
        stops: the stopping texts.
        prompt: what came before it, which may end with the tag that begins hidden reasoning.

    Example:
        >>> cut("7. Question: 8", ["Question:", "."]), cut("<think>1. 2.</think>7. 8", ["."])
        ('7', '<think>1. 2.</think>7')
    """
    start = answer_start(text, opened=prompt.rstrip().endswith(THINK_TAGS[0]))
    return text if start is None else text[: first_stop(text, stops, start)]


def stops_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the stopping texts of a request."""
    until = options.get("until") or ()
    return tuple(stop for stop in ((until,) if isinstance(until, str) else until) if stop)


def room_of(options: Mapping[str, Any], default: int) -> int:
    """Returns the most tokens that a request asks for."""
    return next((int(options[name]) for name in ROOM if options.get(name) is not None), default)


def check_options(options: Mapping[str, Any], known: Sequence[str], cold: Sequence[str], temperature: float) -> None:
    """Refuses settings of a request that would change its text and are not supported.

    Args:
        options: of the request.
        known: settings that the model supports.
        cold: settings that change nothing at temperature 0.
        temperature: of the request.

    Raises:
        ArgumentError: names the other settings, and those that are supported.
    """
    known = (*ROOM, "until", "do_sample", "temperature", *known, *(cold if temperature == 0.0 else ()))
    if unknown := sorted(set(options) - set(known)):
        raise ArgumentError(
            f"the task asks for {', '.join(unknown)}, which this model does not support at temperature "
            f"{temperature:g}; it supports {', '.join(known)}"
        )
