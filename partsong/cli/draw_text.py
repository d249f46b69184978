"""Shows a text in the terminal: as it grows, as its tokens are decided, or when it is done."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from partsong.cli.screen import BOLD, DIM, PALETTE, UNDERLINE, Piece, Screen, is_live, printable, wrapped
from partsong.cli.text_pieces import Pieces

if TYPE_CHECKING:
    from partsong.jobs.texts import LoadedText
    from partsong.samplers.text import Step

__all__ = ["Drawing", "Growing", "Viewer", "WholeText", "viewer"]

#: Minimum seconds that a drawing stays, because small models are faster than the eye. They do not count as decoding.
FRAME_SECONDS = 0.06


class Viewer(Protocol):
    """Shows a text for ``partsong text``.

    Attributes:
        watches: whether every step is shown to it.
    """

    watches: bool

    def step(self, step: Step) -> None:
        """Shows a step."""
        ...

    def end(self, text: str) -> None:
        """Prints the rest of the finished text."""
        ...


def viewer(loaded: LoadedText, *, show: bool, stream: TextIO | None = None) -> Viewer:
    """Chooses a viewer: a drawing with ``--show``, else a growing text on a terminal and the whole text elsewhere.

    Args:
        loaded: what is about to be decoded.
        show: whether to draw every step.
        stream: where to print; None is standard output.
    """
    target: TextIO = stream or sys.stdout
    live = is_live(target)
    if show:
        return Drawing(loaded, target, live=live, colour=live and not os.environ.get("NO_COLOR"))
    # The text of a prompt with gaps begins before the first gap; a growing text would omit that part.
    return Growing(loaded, target) if live and not loaded.before_gap else WholeText(target)


class WholeText:
    """Prints the text when it is done.

    Args:
        stream: where to print.
    """

    watches = False

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def step(self, step: Step) -> None:
        """Shows nothing."""

    def end(self, text: str) -> None:
        """Prints all of it."""
        self.stream.write(printable(text, self.stream) + "\n")
        self.stream.flush()


class Growing:
    """Prints the part of the text that is final, as it grows.

    Args:
        loaded: what is decoded.
        stream: where to print.
    """

    watches = True

    def __init__(self, loaded: LoadedText, stream: TextIO) -> None:
        from partsong.samplers.text import TextStream

        self.stream = stream
        self.text = TextStream(lambda ids: loaded.spell(list(ids)), skip=loaded.request.stop_token_ids)

    def step(self, step: Step) -> None:
        """Prints what is new."""
        if new := self.text.feed(step):
            self.stream.write(printable(new, self.stream))
            self.stream.flush()

    def end(self, text: str) -> None:
        """Prints the rest, or the whole text again if the tokenizer spells its beginning differently now."""
        shown = self.text.shown
        rest = text.removeprefix(shown) if text.startswith(shown) else f"\n{text}"
        self.stream.write(printable(rest, self.stream) + "\n")
        self.stream.flush()


class Drawing:
    """Draws every step: the text so far, the undecided positions, and which step decided each token.

    On a terminal the drawing is renewed in place. A token has the colour of the step that decided it; it is bold in
    that step, and underlined if it was revised. Elsewhere a step is a line, and ``~`` marks a revised token.

    Args:
        loaded: what is decoded.
        stream: where to print.
        live: whether to renew the drawing in place.
        colour: whether to use colours and styles.
        frame_seconds: how long a drawing stays at least.
    """

    watches = True

    def __init__(
        self, loaded: LoadedText, stream: TextIO, *, live: bool, colour: bool, frame_seconds: float = FRAME_SECONDS
    ) -> None:
        self.stream, self.live, self.colour, self.frame_seconds = stream, live, colour, frame_seconds
        prompt = loaded.request.prompts[0]
        self.offset = len(prompt)
        before = prompt[-1] if prompt else None
        self.pieces = Pieces(loaded.tokenizer, before, loaded.request.model.mask_token_id, block(stream))
        self.beginning = loaded.spell(loaded.before_gap)
        #: For each position of the answer, the step that decided it and whether that was a revision.
        self.decided: dict[int, tuple[int, bool]] = {}
        self.screen, self.is_cut = Screen(stream, colour=colour), False

    def step(self, step: Step) -> None:
        """Draws a step."""
        for event in step.events:
            self.decided[event.position - self.offset] = (step.number, event.kind != "commit")
        tokens = step.tokens.get(0, [])
        pieces = [(printable(self.beginning, self.stream), DIM)] if self.beginning else []
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
        """Prints the text, unless the last drawing shows all of it."""
        if not self.live or self.is_cut or not self.screen.rows:
            WholeText(self.stream).end(text)

    def _changes(self, step: Step) -> str:
        kinds = [event.kind for event in step.events]
        named = {"revise": "revised", "insert": "inserted", "delete": "deleted"}
        counts = [f"{kinds.count(kind)} {word}" for kind, word in named.items() if kind in kinds]
        left = sum(token is None for token in step.tokens.get(0, []))
        return ", ".join([f"+{kinds.count('commit')}", *counts, f"{left} left"])

    def _styled(self, at: int, token: int | None, text: str, now: int) -> Piece:
        text = printable(text, self.stream)
        if token is None:
            return text, DIM
        if at not in self.decided:  # given, not decided
            return text, ""
        number, is_revised = self.decided[at]
        if not self.colour:
            return _marked(text) if is_revised else text, ""
        styles = [f"38;5;{PALETTE[number % len(PALETTE)]}"]
        styles += [BOLD] * (number == now) + [UNDERLINE] * is_revised
        return text, ";".join(styles)

    def _redraw(self, title: str, pieces: list[Piece]) -> None:
        """Draws over the last drawing; shows only the end of a text that does not fit."""
        columns, room = self.screen.size
        lines = wrapped(pieces, columns)
        self.is_cut = len(lines) > room
        wait = self.screen.drawn_at + self.frame_seconds - time.monotonic()
        if self.screen.rows and wait > 0:
            time.sleep(wait)
        self.screen.draw([[(title, DIM)], *lines[-room:]])


def block(stream: TextIO) -> str:
    """Returns a shaded block for an undecided position, or ``_`` if the stream cannot print one."""
    return "░" if printable("░", stream) == "░" else "_"


def _marked(text: str) -> str:
    """Puts a mark before the first visible character of a piece."""
    bare = text.lstrip()
    return f"{text[: len(text) - len(bare)]}~{bare}" if bare else text
