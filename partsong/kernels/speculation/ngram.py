"""Guesses that a text continues as it did after the same tokens earlier, as code, edits and quotations do.

Sources: prompt lookup decoding (Saxena 2023, in transformers) and LLMA (arXiv 2304.04487). Here the latest and the
most frequent continuation are followed, and how long a match must be to be worth a guess is learned as the text grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.rates import Rates
from partsong.knobs import Count, Knobs

__all__ = ["Ngram", "NgramDrafter"]

#: How likely the next token is assumed to be the one that followed the same tokens before, until something is observed:
#: by the least number of equal tokens.
_PRIOR = {1: 0.08, 2: 0.2, 3: 0.35, 4: 0.5, 6: 0.65, 9: 0.8, 14: 0.9}
_LONGEST_MATCH = max(_PRIOR)
_KINDS = [max(kind for kind in _PRIOR if kind <= length) for length in range(1, _LONGEST_MATCH + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ngram(Knobs):
    """Guesses what followed the text's last tokens where they stood before.

    It needs no model and costs microseconds.

    Attributes:
        num: how many of the last tokens are looked up, at most.
        length: how many tokens a guess has, at most.

    >>> Ngram(length=4).build(None, None).layers
    ()
    """

    num: Count = 3
    length: Count = 16

    def build(self, model: Any, tokenizer: Any) -> NgramDrafter:
        """Makes the drafter, for any model."""
        return NgramDrafter(self)


@dataclass(slots=True)
class _Index:
    """Remembers what followed each run of tokens of a text, and how far it has read.

    Attributes:
        after: run of tokens -> next token -> (how often, where it stood last).
        rates: how often guesses were right, by the length of the match.
        read: how many tokens of the text are in it.
    """

    after: dict[tuple[int, ...], dict[int, tuple[int, int]]] = field(default_factory=dict)
    rates: Rates = field(default_factory=lambda: Rates(_PRIOR))
    read: int = 0


class NgramDrafter:
    """Drafts by `Ngram`; see `Drafter`."""

    layers: tuple[int, ...] = ()
    masks: int = 0

    def __init__(self, knobs: Ngram) -> None:
        self._num, self._length = knobs.num, knobs.length
        self._indices: WeakKeyDictionary[DraftText, _Index] = WeakKeyDictionary()

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses the latest continuation, and the most frequent one if that differs."""
        drafts = list[DraftTree]()
        for text, room in zip(texts, rooms, strict=True):
            index, tokens = self._index(text), text.tokens
            places = self._places(index, tokens, len(tokens))
            chains = [self._chain(index, tokens, place, min(room, self._length)) for place in places]
            drafts.append(chains[0] if len(chains) == 1 else DraftTree.union(chains))
        return drafts

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns from the new tokens, whether they had been guessed or not."""
        index, tokens = self._index(text, len(seen.match.tokens)), text.tokens
        while index.read < len(tokens):
            end = index.read
            if places := self._places(index, tokens, end):
                place = places[0]
                index.rates.see(_kind(_match_length(tokens, place, end)), tokens[place] == tokens[end])
            self._read(index, tokens)

    def forget(self, text: DraftText) -> None:
        """Drops the index of a text."""
        self._indices.pop(text, None)

    def _index(self, text: DraftText, new: int = 0) -> _Index:
        """Returns a text's index; one that is not there is made of all but the newest tokens."""
        index = self._indices.get(text)
        if index is None:
            index = self._indices[text] = _Index()
            while index.read < len(text.tokens) - new:
                self._read(index, text.tokens)
        return index

    def _read(self, index: _Index, tokens: list[int]) -> None:
        end = index.read
        token = tokens[end]
        for num in range(1, min(self._num, end) + 1):
            follows = index.after.setdefault(tuple(tokens[end - num : end]), {})
            follows[token] = (follows.get(token, (0, 0))[0] + 1, end)
        index.read += 1

    def _places(self, index: _Index, tokens: list[int], end: int) -> list[int]:
        """Finds where tokens like the last ones before `end` went on: the latest place, then the most frequent one."""
        for num in range(min(self._num, end), 0, -1):
            follows = index.after.get(tuple(tokens[end - num : end]))
            if follows:
                latest, frequent = max(place for _, place in follows.values()), max(follows.values())[1]
                return [latest] if latest == frequent else [latest, frequent]
        return []

    def _chain(self, index: _Index, tokens: list[int], place: int, length: int) -> DraftTree:
        match = _match_length(tokens, place, len(tokens))
        guesses, chances = list[int](), list[float]()
        for depth in range(length):
            here = place + depth
            # A guess that reaches the end of the text continues with itself: the text is assumed to repeat.
            guesses.append(tokens[here] if here < len(tokens) else guesses[here - len(tokens)])
            chances.append(index.rates[_kind(match + depth)])
        return DraftTree.chain(guesses, chances)


def _match_length(tokens: list[int], place: int, end: int) -> int:
    """Counts how many tokens before two places are equal, up to the longest that is distinguished."""
    length = 0
    while length < min(_LONGEST_MATCH, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


def _kind(match: int) -> int:
    return _KINDS[min(max(match, 1), _LONGEST_MATCH) - 1]
