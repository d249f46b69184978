"""Turns tokens into text as they come, and finds the strings that end it, wherever token borders lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partsong.reasoning.calls.thoughts import THINK_TAGS, answer_start, first_stop

__all__ = ["AnswerText"]

#: A decoder writes this for bytes that do not make a character yet.
_BROKEN = "\ufffd"


class AnswerText:
    """Builds the text of one answer.

    Args:
        tokenizer: a transformers tokenizer.
        stops: strings that end the answer; they are not part of it. Within hidden reasoning before the answer they do
            not count.
        opened: whether the prompt ended within hidden reasoning.
        in_thoughts: whether stop strings count there too.

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

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, opened: bool = False, in_thoughts: bool = False
    ) -> None:
        self._tokenizer, self._stops, self._opened = tokenizer, tuple(stops), opened
        # Where the answer begins, once that is known.
        self._answer: int | None = 0 if in_thoughts or not stops else None
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
        end, held = self._find_end(begin)
        self.stopped = end is not None
        certain = end if end is not None else len(self._text) - held
        before, self._returned = self._returned, max(self._returned, certain)
        return self._text[before : self._returned]

    def final(self) -> str:
        """Returns the whole answer, cut before the stop string."""
        whole = self._decode(self._ids)
        end = self._whole_end(whole)
        if end is None and self.stopped:
            # Decoded together, the tokens may give other text (some tokenizers move spaces): the streamed text counts.
            whole, end = self._text, self._whole_end(self._text)
        return whole if end is None else whole[:end]

    def _find_end(self, begin: int) -> tuple[int | None, int]:
        """Finds the end of the answer in the text, new from `begin` on, and counts what may begin a stop string."""
        if self._answer is None:
            self._answer = answer_start(self._text, opened=self._opened, whole=False)
            if self._answer is None:
                opened = self._opened or self._text.lstrip().startswith(THINK_TAGS[0])
                return None, 0 if opened else len(self._text)
            begin = self._answer
        longest = max(map(len, self._stops), default=1)
        end = first_stop(self._text, self._stops, max(self._answer, begin - longest + 1))
        return end, _count_held(self._text[max(self._answer, len(self._text) - longest) :], self._stops)

    def _whole_end(self, text: str) -> int | None:
        start = 0 if self._answer == 0 else answer_start(text, opened=self._opened)
        return None if start is None else first_stop(text, self._stops, start)

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


def _count_held(text: str, stops: Sequence[str]) -> int:
    """Counts the characters at the end that may begin a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    for count in range(longest, 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0
