"""Text that parts into threads and comes together again.

A text is a tuple of parts in reading order: a `str` is what somebody put there, a `Piece` what a model wrote, and a
`Fork` is where the text goes on in several threads at once, each again a tuple of parts. What stands behind a fork has
read all of its threads; no thread has read another one. Everything that needs to know this, such as attention masks,
positions, prompts, training data and calls, is made of this one form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Fork", "Part", "Piece", "flat_text", "has_fork", "pieces_of", "shape_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that a model wrote, and that may know by which call.

    Attributes:
        text: the text.
        source: name of the call; empty in data.
        tokens: ids of the very tokens that were drawn, where the engine tells them; None where only the text is known.
    """

    text: str
    source: str = ""
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a text goes on in several threads at once.

    Attributes:
        threads: each a tuple of parts; in a tree of tokens, of runs.
        marks: thought embedding of each thread (ParaThinker); empty is none.
        apart: the threads read nothing that stands before the fork, and what follows reads nothing of them (APR): they
            are texts of their own, and what they return stands in the text as any other part.

    >>> fork = Fork((("1: ", Piece("left")), ("2: ", Piece("right"))))
    >>> flat_text(("See ", fork, "."))
    'See 1: left2: right.'
    """

    threads: tuple[tuple[Any, ...], ...]
    marks: tuple[int, ...] = ()
    apart: bool = False

    def mark(self, thread: int) -> int:
        """Thought embedding of a thread; 0 is none."""
        return self.marks[thread] if self.marks else 0


Part = str | Piece | Fork


def flat_text(parts: Sequence[Part]) -> str:
    """The text as it reads from beginning to end, thread behind thread: what a server without threads is given."""
    return "".join(_texts(parts))


def _texts(parts: Sequence[Part]) -> Iterator[str]:
    return (part if isinstance(part, str) else part.text for part in _read(parts))


def _read(parts: Sequence[Part]) -> Iterator[str | Piece]:
    """What somebody behind the last part has read."""
    for part in parts:
        if not isinstance(part, Fork):
            yield part
        elif not part.apart:
            for thread in part.threads:
                yield from _read(thread)


def pieces_of(parts: Sequence[Part]) -> Iterator[Piece]:
    """All pieces that somebody behind the last part has read, in reading order."""
    return (part for part in _read(parts) if isinstance(part, Piece))


def has_fork(parts: Sequence[Part]) -> bool:
    """Whether the text parts and comes together anywhere."""
    return any(isinstance(part, Fork) and not part.apart for part in parts)


def shape_of(parts: Sequence[Part]) -> str | list[Any]:
    """The text where it does not part, else lists of texts and forks: tells texts apart that read the same.

    >>> shape_of(("a", Piece("b"))), shape_of(("a", Fork((("b",), ("c",)))))
    ('ab', ['a', [['b'], ['c']]])
    """
    if not has_fork(parts):
        return flat_text(parts)
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Fork):
            if part.apart:
                continue
            threads = [shape_of(thread) for thread in part.threads]
            forks = [thread if isinstance(thread, list) else [thread] for thread in threads]
            found.append([forks, list(part.marks)] if part.marks else forks)
        elif found and isinstance(found[-1], str):
            found[-1] += flat_text((part,))
        else:
            found.append(flat_text((part,)))
    return found
