"""Draws in place on the last lines of a terminal."""

from __future__ import annotations

import os
import shutil
import time
import unicodedata
from typing import TextIO

__all__ = ["BOLD", "DIM", "PALETTE", "UNDERLINE", "Piece", "Screen", "columns", "is_live", "printable", "wrapped"]

#: Some of a terminal's 256 colours; neighbours are easy to tell apart.
PALETTE = (39, 214, 78, 205, 220, 51, 203, 141, 118, 209)
DIM, BOLD, UNDERLINE = "2", "1", "4"
#: A piece of text, and the parameters of the terminal's "select graphic rendition" to print it with; "" is plain.
Piece = tuple[str, str]


def is_live(stream: TextIO) -> bool:
    """Says whether written text can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Screen:
    """Overwrites the last lines of a terminal with every drawing.

    Args:
        stream: the terminal.
        colour: use colours and styles.

    Attributes:
        rows: lines of the last drawing.
        drawn_at: when it was drawn.
    """

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self.stream, self.colour = stream, colour
        self.rows, self.drawn_at = 0, 0.0

    @property
    def size(self) -> tuple[int, int]:
        """Returns the columns that can be used, and the lines below a title."""
        terminal = shutil.get_terminal_size()
        return max(terminal.columns - 1, 8), max(terminal.lines - 2, 1)

    def draw(self, lines: list[list[Piece]]) -> None:
        """Writes lines over the last drawing."""
        back = f"\x1b[{self.rows}F\x1b[0J" if self.rows else ""
        self.stream.write(back + "".join("".join(map(self._print, line)) + "\n" for line in lines))
        self.stream.flush()
        self.rows, self.drawn_at = len(lines), time.monotonic()

    def _print(self, piece: Piece) -> str:
        text, style = piece
        return f"\x1b[{style}m{text}\x1b[0m" if style and self.colour else text


def printable(text: str, stream: TextIO) -> str:
    r"""Makes a text safe to print: it cannot control the terminal, and the stream can encode all of it.

    >>> import io
    >>> printable("red \x1b[2J alert", io.StringIO())
    'red �[2J alert'
    """
    safe = "".join(_safe(character) for character in text.expandtabs(4))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return safe.encode(encoding, "replace").decode(encoding)


def _safe(character: str) -> str:
    # Control characters, and the marks that reverse the writing direction.
    hidden = unicodedata.category(character) in ("Cc", "Cs") or character in "\u202a\u202b\u202c\u202d\u202e"
    return "\N{REPLACEMENT CHARACTER}" if hidden and character != "\n" else character


def wrapped(pieces: list[Piece], width: int) -> list[list[Piece]]:
    """Cuts pieces into lines of at most `width` columns."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for text, style in pieces:
        part = ""
        for character in text:
            wide = columns(character)
            if character == "\n" or used + wide > width:
                lines[-1].append((part, style))
                lines.append([])
                part, used = "", 0
            if character != "\n":
                part, used = part + character, used + wide
        lines[-1].append((part, style))
    return lines


def columns(character: str) -> int:
    """Returns how many cells of the terminal a character takes."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
