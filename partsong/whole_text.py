"""Cleans text of half characters, which can be read but not written.

JSON and Python write a character beyond the first 65536, such as an emoji, as two surrogates. A server that cuts a text
between them, or a command line in another encoding, leaves one alone, and that has no form in UTF-8: no file, socket or
database takes it. So text is cleaned where it is read.
"""

from __future__ import annotations

import codecs
from typing import Any

__all__ = ["CleanedPieces", "whole_json", "whole_text"]

_HALVES = "utf-16-le", "surrogatepass"


def whole_text(text: str) -> str:
    r"""Joins the halves of characters that follow each other, and replaces those that are alone.

    >>> whole_text("4 \ud83d\ude00 \ud83d")
    '4 😀 �'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(*_HALVES).decode(_HALVES[0], "replace")
    return text


def whole_json(value: Any) -> Any:
    """Cleans every text of a value that JSON can hold, keys included."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [whole_json(each) for each in value]
    if isinstance(value, dict):
        return {whole_json(key): whole_json(each) for key, each in value.items()}
    return value


class CleanedPieces:
    r"""Cleans a text that comes in pieces: a half at the end of one waits for the next.

    >>> text = CleanedPieces()
    >>> [text.push("4 \ud83d"), text.push("\ude00"), text.push("\ud83d"), text.end()]
    ['4 ', '😀', '', '�']
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder(_HALVES[0])("replace")

    def push(self, piece: str) -> str:
        """Returns what is whole now."""
        return self._decoder.decode(piece.encode(*_HALVES))

    def end(self) -> str:
        """Returns what stands for a half that nothing followed."""
        return self._decoder.decode(b"", True)
