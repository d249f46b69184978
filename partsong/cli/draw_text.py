"""Shows a text in the terminal: as it grows, as it is decided place by place, or when it is done."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from partsong.evals.texts import LoadedText
    from partsong.samplers.text import Step

__all__ = ["Drawing", "Growing", "Pieces", "Viewer", "Whole", "printable", "viewer"]

#: Colours of the 256 that terminals know, one per step, over and over; neighbours are easy to tell apart.
PALETTE = (39, 214, 78, 205, 220, 51, 203, 141, 118, 209)
#: Seconds a frame stays at least: small models are faster than the eye. Not counted as decoding.
FRAME_SECONDS = 0.06
_DIM, _BOLD, _UNDERLINE = "2", "1", "4"
#: A piece of text and how to print it: parameters of the terminal's "select graphic rendition", or nothing.
Piece = tuple[str, str]


class Viewer(Protocol):
    """What ``partsong text`` prints a text with.

    Attributes:
        watches: whether it wants to see the steps.
    """

    watches: bool

    def step(self, step: Step) -> None:
        """Shows a step."""
        ...

    def end(self, text: str) -> None:
        """Prints what is missing of the finished text."""
        ...


def viewer(loaded: LoadedText, *, show: bool, stream: TextIO | None = None) -> Viewer:
    """What suits the output: with ``--show`` a drawing; else on terminals a growing text, elsewhere the whole one.

    Args:
        loaded: what is about to be decoded.
        show: whether every step is drawn.
        stream: where to; None is standard output.
    """
    target: TextIO = stream or sys.stdout
    live = target.isatty() and os.environ.get("TERM") != "dumb"
    if show:
        return Drawing(loaded, target, live=live, colour=live and not os.environ.get("NO_COLOR"))
    # The beginning of a prompt with gaps belongs to the text and is not part of the stream.
    return Growing(loaded, target) if live and not loaded.kept else Whole(target)


class Whole:
    """Prints the text when it is done.

    Args:
        stream: where to.
    """

    watches = False

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def step(self, step: Step) -> None:
        """Nothing."""

    def end(self, text: str) -> None:
        """All of it."""
        self.stream.write(printable(text, self.stream) + "\n")
        self.stream.flush()


class Growing:
    """Prints the beginning of the text that cannot change any more, as it grows.

    Args:
        loaded: what is decoded.
        stream: where to.
    """

    watches = True

    def __init__(self, loaded: LoadedText, stream: TextIO) -> None:
        from partsong.samplers.text import TextStream

        self.stream = stream
        self.text = TextStream(lambda ids: loaded.spell(list(ids)), skip=loaded.request.stop_token_ids)

    def step(self, step: Step) -> None:
        """What is new."""
        if new := self.text.feed(step):
            self.stream.write(printable(new, self.stream))
            self.stream.flush()

    def end(self, text: str) -> None:
        """The rest; all of it where the tokenizer spells the whole otherwise than its beginning."""
        shown = self.text.shown
        rest = text.removeprefix(shown) if text.startswith(shown) else f"\n{text}"
        self.stream.write(printable(rest, self.stream) + "\n")
        self.stream.flush()


class Drawing:
    """Draws every step: the text so far, places that are undecided, and which step decided what.

    On a terminal the drawing is renewed in place, a token in the colour of the step that decided it, bold in that step
    and underlined once it was revised. Elsewhere a step is a line, and a revised token is marked with ``~``.

    Args:
        loaded: what is decoded.
        stream: where to.
        live: renew the drawing in place.
        colour: use colours and styles.
        frame_seconds: how long a frame stays at least.
    """

    watches = True

    def __init__(
        self,
        loaded: LoadedText,
        stream: TextIO,
        *,
        live: bool,
        colour: bool,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self.stream, self.live, self.colour, self.frame_seconds = stream, live, colour, frame_seconds
        prompt = loaded.request.prompts[0]
        self.offset = len(prompt)
        before = prompt[-1] if prompt else None
        self.pieces = Pieces(loaded.tokenizer, before, loaded.request.model.mask_token_id, block(stream))
        self.beginning = loaded.spell(loaded.kept)
        #: By place of the answer: the step that decided it, and whether that was a revision.
        self.decided: dict[int, tuple[int, bool]] = {}
        self.rows, self.shown_at, self.is_cut = 0, 0.0, False

    def step(self, step: Step) -> None:
        """Draws a step."""
        for event in step.events:
            self.decided[event.position - self.offset] = (step.number, event.kind != "commit")
        tokens = step.tokens.get(0, [])
        pieces = [(printable(self.beginning, self.stream), _DIM)] if self.beginning else []
        texts = self.pieces(tokens)
        if texts and not pieces:
            texts[0] = texts[0].lstrip(" ")
        pieces += [self._styled(at, token, texts[at], step.number) for at, token in enumerate(tokens)]
        title = f"step {step.number + 1}: {self._changes(step)}"
        if self.live:
            self._redraw(title, pieces)
        else:
            line = "".join(text for text, _ in pieces).replace("\n", "\\n").strip()
            self.stream.write(f"{title} | {line}\n")

    def end(self, text: str) -> None:
        """The text, unless the last frame shows all of it."""
        if not self.live or self.is_cut or not self.rows:
            Whole(self.stream).end(text)

    def _changes(self, step: Step) -> str:
        kinds = [event.kind for event in step.events]
        named = {"revise": "revised", "insert": "inserted", "delete": "deleted"}
        counts = [f"{kinds.count(kind)} {word}" for kind, word in named.items() if kind in kinds]
        left = sum(token is None for token in step.tokens.get(0, []))
        return ", ".join([f"+{kinds.count('commit')}", *counts, f"{left} left"])

    def _styled(self, at: int, token: int | None, text: str, now: int) -> Piece:
        text = printable(text, self.stream)
        if token is None:
            return text, _DIM
        if at not in self.decided:  # given, not decided
            return text, ""
        number, is_revised = self.decided[at]
        if not self.colour:
            return _marked(text) if is_revised else text, ""
        styles = [f"38;5;{PALETTE[number % len(PALETTE)]}"]
        styles += [_BOLD] * (number == now) + [_UNDERLINE] * is_revised
        return text, ";".join(styles)

    def _redraw(self, title: str, pieces: list[Piece]) -> None:
        """Over what was drawn before; the end of a text that is longer than the terminal is high."""
        size = shutil.get_terminal_size()
        lines = _wrapped(pieces, max(size.columns - 1, 8))
        room = max(size.lines - 2, 1)
        self.is_cut = len(lines) > room
        lines = [[(title, _DIM)], *lines[-room:]]
        wait = self.shown_at + self.frame_seconds - time.monotonic()
        if self.rows and wait > 0:
            time.sleep(wait)
        back = f"\x1b[{self.rows}F\x1b[0J" if self.rows else ""
        self.stream.write(back + "".join("".join(map(self._print, line)) + "\n" for line in lines))
        self.stream.flush()
        self.rows, self.shown_at = len(lines), time.monotonic()

    def _print(self, piece: Piece) -> str:
        text, style = piece
        return f"\x1b[{style}m{text}\x1b[0m" if style and self.colour else text


class Pieces:
    """What every token adds to a text.

    A token is spelled after the one before it, so that words are set apart as the tokenizer does; tokens that are no
    whole characters are spelled together.

    Args:
        tokenizer: of the model.
        before: the token before the first one; None is none.
        mask: the token that stands where nothing is decided; None is none.
        block: what is shown there.
    """

    def __init__(self, tokenizer: Any, before: int | None, mask: int | None, block: str) -> None:
        self.tokenizer, self.before, self.mask, self.block = tokenizer, before, mask, block
        self.mask_text = "" if mask is None else tokenizer.decode([mask]).strip()
        self.known: dict[tuple[int | None, int], str] = {}

    def __call__(self, tokens: Sequence[int | None]) -> list[str]:
        """The pieces of some tokens, None where nothing is decided."""
        found: list[str] = []
        last = self.before
        for token in tokens:
            shown = self.mask if token is None else token
            if shown is None:
                found.append(self.block)
                continue
            piece = self._after(last, shown)
            if token is None:
                piece = piece.replace(self.mask_text, self.block) if self.mask_text else self.block
            found.append(piece)
            last = shown
        return self._whole(found, tokens)

    def _after(self, last: int | None, token: int) -> str:
        if (last, token) not in self.known:
            start = "" if last is None else self.tokenizer.decode([last])
            both = self.tokenizer.decode([token] if last is None else [last, token])
            # Some tokenizers spell a token otherwise once another follows it.
            piece = both.removeprefix(start) if both.startswith(start) else self.tokenizer.decode([token])
            self.known[last, token] = piece
        return self.known[last, token]

    def _is_part(self, token: int | None) -> bool:
        return token is not None and "\N{REPLACEMENT CHARACTER}" in self._after(None, token)

    def _whole(self, pieces: list[str], tokens: Sequence[int | None]) -> list[str]:
        """Runs of tokens that are parts of characters, spelled as one; its first token carries the text."""
        start = 0
        while start < len(pieces):
            end = start
            while end < len(pieces) and self._is_part(tokens[end]):
                end += 1
            if end > start:
                pieces[start:end] = [self.tokenizer.decode(list(tokens[start:end])), *[""] * (end - start - 1)]
            start = max(end, start + 1)
        return pieces


def printable(text: str, stream: TextIO) -> str:
    r"""A text that is safe to print: nothing in it steers the terminal, and its characters exist where it goes.

    >>> import io
    >>> printable("red \x1b[2J alert", io.StringIO())
    'red �[2J alert'
    """
    safe = "".join(_safe(character) for character in text.expandtabs(4))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return safe.encode(encoding, "replace").decode(encoding)


def block(stream: TextIO) -> str:
    """What stands for an undecided place: a shaded block, or ``_`` where there is none."""
    return "░" if printable("░", stream) == "░" else "_"


def _safe(character: str) -> str:
    # Controls, and the marks that turn the writing direction around.
    hidden = unicodedata.category(character) in ("Cc", "Cs") or character in "\u202a\u202b\u202c\u202d\u202e"
    return "\N{REPLACEMENT CHARACTER}" if hidden and character != "\n" else character


def _marked(text: str) -> str:
    """A piece with a mark before its first visible character."""
    bare = text.lstrip()
    return f"{text[: len(text) - len(bare)]}~{bare}" if bare else text


def _wrapped(pieces: list[Piece], width: int) -> list[list[Piece]]:
    """Pieces cut into lines of at most `width` columns."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for text, style in pieces:
        part = ""
        for character in text:
            columns = _columns(character)
            if character == "\n" or used + columns > width:
                lines[-1].append((part, style))
                lines.append([])
                part, used = "", 0
            if character != "\n":
                part, used = part + character, used + columns
        lines[-1].append((part, style))
    return lines


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
