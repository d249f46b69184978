"""Represents text that splits into threads and joins them again.

A text is a tuple of parts in reading order. A `str` is text that a program or a user put there, and a `Piece` is what a
model wrote. At a `Fork` the text continues in several threads at once, each again a tuple of parts. What follows a fork
has read all of its threads; no thread has read another one. Attention masks, positions, prompts, training data and
calls are all made from this one form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Fork", "Part", "Piece", "flat_text", "has_fork", "pieces_of", "shape_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds text that a model wrote, and the call that wrote it.

    Attributes:
        text: the text.
        source: name of the call; empty in data.
        tokens: ids of the tokens that were drawn, where the engine reports them; None where only the text is known.
    """

    text: str
    source: str = ""
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Splits a text into several concurrent threads.

    Attributes:
        threads: the threads, each a tuple of parts; in a tree of tokens, of runs.
        marks: thought embedding of each thread (ParaThinker); empty where there are no such embeddings.
        apart: whether the threads are texts of their own (APR): they read nothing before the fork, and what follows
            reads nothing of them. Their return values are part of the text like any other.

    >>> fork = Fork((("1: ", Piece("left")), ("2: ", Piece("right"))))
    >>> flat_text(("See ", fork, "."))
    'See 1: left2: right.'
    """

    threads: tuple[tuple[Any, ...], ...]
    marks: tuple[int, ...] = ()
    apart: bool = False

    def mark(self, thread: int) -> int:
        """Returns the thought embedding of a thread; 0 where it has none."""
        return self.marks[thread] if self.marks else 0


Part = str | Piece | Fork


def flat_text(parts: Sequence[Part]) -> str:
    """Returns the whole text, thread after thread, as a server without threads reads it."""
    return "".join(part if isinstance(part, str) else part.text for part in _read(parts))


def _read(parts: Sequence[Part]) -> Iterator[str | Piece]:
    """Yields what a reader has read after the last part."""
    for part in parts:
        if not isinstance(part, Fork):
            yield part
        elif not part.apart:
            for thread in part.threads:
                yield from _read(thread)


def pieces_of(parts: Sequence[Part]) -> Iterator[Piece]:
    """Yields all pieces that a reader has read after the last part, in reading order."""
    return (part for part in _read(parts) if isinstance(part, Piece))


def has_fork(parts: Sequence[Part]) -> bool:
    """Returns whether the text has a fork."""
    return any(isinstance(part, Fork) and not part.apart for part in parts)


def shape_of(parts: Sequence[Part]) -> str | list[Any]:
    """Returns the text if it has no fork, otherwise lists of texts and forks, which distinguish equal flat texts.

    >>> shape_of(("a", Piece("b"))), shape_of(("a", Fork((("b",), ("c",)))))
    ('ab', ['a', [['b'], ['c']]])
    """
    if not has_fork(parts):
        return flat_text(parts)
    shape: list[Any] = []
    for part in parts:
        if isinstance(part, Fork):
            if part.apart:
                continue
            threads = [shape_of(thread) for thread in part.threads]
            forks = [thread if isinstance(thread, list) else [thread] for thread in threads]
            shape.append([forks, list(part.marks)] if part.marks else forks)
        elif shape and isinstance(shape[-1], str):
            shape[-1] += flat_text((part,))
        else:
            shape.append(flat_text((part,)))
    return shape
