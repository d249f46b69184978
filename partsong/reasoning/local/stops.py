"""Turns tokens into text as they come, and finds the strings that end it, wherever token borders lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["AnswerText"]

#: A decoder writes this for bytes that do not make a character yet.
_BROKEN = "\ufffd"


class AnswerText:
    """Builds the text of one answer.

    Args:
        tokenizer: a transformers tokenizer.
        stops: strings that end the answer; they are not part of it.

    Attributes:
        stopped: whether a stop string has appeared.

    >>> class Letters:
    ...     def decode(self, ids, **options):
    ...         return "".join(map(chr, ids))
    >>> text = AnswerText(Letters(), ["cd"])
    >>> [text.push(ord(letter)) for letter in "abcde"[:4]]
    ['a', 'b', '', '']
    >>> text.stopped, text.final()
    (True, 'ab')
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        # Tokens before `_from` are not read again. Those between `_from` and `_to` only show what the next ones add.
        self._from = self._to = 0
        self._text, self._returned = "", 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is certain now and was not before.

        Bytes that do not make a character yet are held back, and so is a possible beginning of a stop string.
        """
        self._ids.append(token)
        known = self._decode(self._ids[self._from : self._to])
        now = self._decode(self._ids[self._from :])
        if now.endswith(_BROKEN):
            return ""
        begin = len(self._text)
        self._text += now[len(known) :]
        self._from, self._to = self._to, len(self._ids)
        end = _first(self._text, self._stops, begin)
        self.stopped = end is not None
        certain = end if end is not None else len(self._text) - _count_held(self._text, self._stops)
        before, self._returned = self._returned, max(self._returned, certain)
        return self._text[before : self._returned]

    def final(self) -> str:
        """Returns the whole answer, cut before the stop string."""
        whole = self._decode(self._ids)
        end = _first(whole, self._stops)
        if end is None and self.stopped:
            # Decoded together, the tokens may give other text (some tokenizers move spaces): the streamed text counts.
            whole, end = self._text, _first(self._text, self._stops)
        return whole if end is None else whole[:end]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns the ids of the answer's text: those that were pushed, up to its end.

        If the answer ends inside a token, its last part is encoded again.
        """
        text, count = self.final(), len(self._ids)
        while count and not text.startswith(self._decode(self._ids[:count])):
            count -= 1
        rest = text[len(self._decode(self._ids[:count])) :]
        more = self._tokenizer(rest, add_special_tokens=False).input_ids if rest else ()
        return (*self._ids[:count], *more)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


def _first(text: str, stops: Sequence[str], new: int = 0) -> int | None:
    """Finds where the earliest stop string begins, if the text before `new` is known to hold no whole one."""
    places = [text.find(stop, max(0, new - len(stop) + 1)) for stop in stops]
    return min((place for place in places if place >= 0), default=None)


def _count_held(text: str, stops: Sequence[str]) -> int:
    """Counts the characters at the end that may begin a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    for count in range(longest, 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0
