"""Separates an answer from hidden reasoning between tags in its own text."""

from __future__ import annotations

from partsong.errors import ArgumentError
from partsong.reasoning.calls.thoughts import THINK_TAGS

__all__ = ["THINK_TAGS", "check_tags", "without_thoughts"]


def check_tags(tags: tuple[str, str] | None) -> tuple[str, str] | None:
    """Returns tags, or None; refuses tags that are not two different texts."""
    if tags is None:
        return None
    if len(tags) != 2 or not all(tags) or tags[0] == tags[1]:
        raise ArgumentError(f'think_tags={tags!r}; use two different texts such as ("<think>", "</think>"), or None')
    return tags[0], tags[1]


def without_thoughts(text: str, tags: tuple[str, str] | None) -> tuple[str, str]:
    """Splits a text that begins with thoughts; returns the answer and the thoughts.

    Only thoughts at the very beginning count, so that an answer may speak about the tags. A text that has only the
    closing tag began inside its thoughts: some chat templates end with the opening tag. Thoughts that never end leave
    an empty answer. Without tags all of the text is the answer.

    >>> without_thoughts("<think>2 and 2</think>4", THINK_TAGS)
    ('4', '2 and 2')
    """
    if tags is None:
        return text, ""
    opening, closing = tags
    begin = text.lstrip()
    opened = begin.startswith(opening)
    inside = begin.removeprefix(opening)
    if not opened and (closing not in inside or opening in inside.split(closing)[0]):
        return text, ""
    thoughts, closed, answer = inside.partition(closing)
    return (answer.lstrip() if closed else ""), thoughts.strip()
