"""Lays out a text with threads as one row of tokens, with their positions and what each of them sees.

The same layout serves training (positions and a mask for one forward) and describes what the engines compute token by
token, so the two cannot disagree. Two readings of one text are trained:

- joined (Multiverse, arXiv 2506.09991; ParaThinker, arXiv 2509.04475): every token occurs once, and threads start at
  the same position. What follows sees all of them and continues after the longest. This is for engines that join keys.
- replayed (ThreadWeaver, arXiv 2512.07843): what follows has read the threads one after the other, like a server that
  reads the whole text again. See `replayed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from partsong.errors import ArgumentError
from partsong.reasoning.calls.text_tree import Fork, Part, Piece

#: End of a range that reaches to the end of the row.
_TO_THE_END = -1

__all__ = ["Hidden", "ThreadLayout", "TokenRun", "Tokens", "encoded", "lay_out", "num_tokens", "replayed"]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Holds tokens of one thread.

    Attributes:
        tokens: token ids.
        learn: whether a model wrote them, so that training takes its loss there.
    """

    tokens: tuple[int, ...]
    learn: bool = False


#: A text of threads as tokens: runs, and forks of such texts.
Tokens = tuple[TokenRun | Fork, ...]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Names queries and the keys they must not see, as half-open ranges of the row."""

    query_first: int
    query_end: int
    key_first: int
    key_end: int


@dataclass(slots=True)
class ThreadLayout:
    """Holds one row of tokens.

    A query sees itself and all keys before it, except for what is hidden.

    Attributes:
        tokens: token ids.
        positions: position of each token; tokens of parallel threads share positions.
        learn: whether training takes its loss at the token itself (not at the one after it).
        marks: thought embedding of each token.
        hidden: one range per thread but the first of each fork, and two per fork with separate threads.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    learn: list[bool] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)

    def sees(self, query: int, key: int) -> bool:
        """Returns whether one token sees another."""
        inside = (h for h in self.hidden if h.query_first <= query < h.query_end)
        return key <= query and not any(h.key_first <= key < h.key_end for h in inside)


def encoded(parts: Sequence[Part], encode: Callable[[str], Sequence[int]]) -> Tokens:
    """Encodes each part by itself; pieces that a model drew keep the tokens they were drawn with.

    Args:
        parts: the text.
        encode: returns the token ids of a text, without tokens for its beginning or end.

    >>> encoded(("ab", Fork((("c",), (Piece("d"),)))), lambda text: [ord(letter) for letter in text])[0]
    TokenRun(tokens=(97, 98), learn=False)
    """
    tree: list[TokenRun | Fork] = []
    for part in parts:
        if isinstance(part, Fork):
            tree.append(replace(part, threads=tuple(encoded(thread, encode) for thread in part.threads)))
        elif isinstance(part, Piece):
            ids = encode(part.text) if part.tokens is None else part.tokens
            tree.append(TokenRun(tuple(ids), learn=True))
        else:
            tree.append(TokenRun(tuple(encode(part))))
    return tuple(tree)


def num_tokens(tree: Sequence[TokenRun | Fork]) -> int:
    """Counts the tokens of all threads together."""
    return sum(len(part.tokens) if isinstance(part, TokenRun) else sum(map(num_tokens, part.threads)) for part in tree)


def lay_out(tree: Sequence[TokenRun | Fork]) -> ThreadLayout:
    """Lays a text out as a row, depth first; see the module.

    Raises:
        ArgumentError: a fork has no threads, or its marks and threads differ in number.

    >>> row = lay_out((TokenRun((5,)), Fork(((TokenRun((6, 7)),), (TokenRun((8,)),))), TokenRun((9,))))
    >>> row.tokens, row.positions, row.hidden
    ([5, 6, 7, 8, 9], [0, 1, 2, 1, 3], [Hidden(query_first=3, query_end=4, key_first=1, key_end=3)])
    """
    row = ThreadLayout()
    _place(tree, 0, 0, row)
    # A range that is hidden from all that follows ends with the row.
    row.hidden = [h if h.query_end >= 0 else replace(h, query_end=len(row.tokens)) for h in row.hidden]
    row.hidden = [h for h in row.hidden if h.query_first < h.query_end and h.key_first < h.key_end]
    return row


def _place(tree: Sequence[TokenRun | Fork], position: int, mark: int, row: ThreadLayout) -> int:
    """Adds a thread that begins at a position; returns the position after it."""
    for part in tree:
        if isinstance(part, TokenRun):
            count = len(part.tokens)
            row.tokens += part.tokens
            row.positions += range(position, position + count)
            row.learn += [part.learn] * count
            row.marks += [mark] * count
            position += count
            continue
        check_fork(part)
        first, ends = len(row.tokens), [position]
        for number, thread in enumerate(part.threads):
            begin = len(row.tokens)
            ends.append(_place(thread, 0 if part.apart else position, part.mark(number) or mark, row))
            row.hidden.append(Hidden(begin, len(row.tokens), 0 if part.apart else first, begin))
        if part.apart:
            row.hidden.append(Hidden(len(row.tokens), _TO_THE_END, first, len(row.tokens)))
        else:
            position = max(ends)
    return position


def check_fork(fork: Fork) -> None:
    """Refuses a fork that has no threads, or whose marks and threads differ in number."""
    if not fork.threads:
        raise ArgumentError("a fork has no threads; leave it out or give it one")
    if fork.marks and len(fork.marks) != len(fork.threads):
        raise ArgumentError(f"a fork has {len(fork.threads)} threads and {len(fork.marks)} marks; give each thread one")


def replayed(tree: Sequence[TokenRun | Fork]) -> Tokens:
    """Returns the text as computed by engines that join by reading again: forks that are never joined.

    The first branch of each fork is the whole text, thread after thread. The other branches are the later threads
    alone, as they were written. The loss of these is taken there; in the whole text they are only read. Laid out, this
    is a trie of all prompts and answers: positions are depths, and a token sees its ancestors. Each later thread occurs
    twice, which is the price of reading it again.

    Source: ThreadWeaver, arXiv 2512.07843.

    >>> tree = (TokenRun((5,)), Fork(((TokenRun((6,), True),), (TokenRun((8,), True),))), TokenRun((9,), True))
    >>> lay_out(replayed(tree)).tokens
    [5, 6, 8, 9, 8]
    """
    parts: list[TokenRun | Fork] = []
    for number, part in enumerate(tree):
        if isinstance(part, TokenRun):
            parts.append(part)
            continue
        check_fork(part)
        if part.apart:
            parts.append(replace(part, threads=tuple(map(replayed, part.threads))))
            continue
        first, *others = part.threads
        read = [run for thread in others for run in _unlearned_runs(thread)]
        whole = replayed((*first, *read, *tree[number + 1 :]))
        parts.append(Fork((whole, *map(replayed, others))))
        break
    return tuple(parts)


def _unlearned_runs(tree: Sequence[TokenRun | Fork]) -> list[TokenRun]:
    """Returns all runs in reading order, without taking a loss there."""
    runs: list[TokenRun] = []
    for part in tree:
        if isinstance(part, TokenRun):
            runs.append(TokenRun(part.tokens))
        elif not part.apart:
            for thread in part.threads:
                runs += _unlearned_runs(thread)
    return runs
