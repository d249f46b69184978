"""Shows a text in the terminal: as it grows, as it is decided place by place, or when it is done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from partsong.cli.screen import BOLD, DIM, PALETTE, UNDERLINE, Piece, Screen, is_live, printable, wrapped

if TYPE_CHECKING:
    from partsong.jobs.texts import LoadedText
    from partsong.samplers.text import Step

__all__ = ["Drawing", "Growing", "Pieces", "Viewer", "WholeText", "viewer"]

#: Seconds a frame stays at least: small models are faster than the eye. Not counted as decoding.
FRAME_SECONDS = 0.06


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
    live = is_live(target)
    if show:
        return Drawing(loaded, target, live=live, colour=live and not os.environ.get("NO_COLOR"))
    # The beginning of a prompt with gaps belongs to the text and is not part of the stream.
    return Growing(loaded, target) if live and not loaded.kept else WholeText(target)


class WholeText:
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
        """The text, unless the last frame shows all of it."""
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
        """Over what was drawn before; the end of a text that is longer than the terminal is high."""
        columns, room = self.screen.size
        lines = wrapped(pieces, columns)
        self.is_cut = len(lines) > room
        wait = self.screen.drawn_at + self.frame_seconds - time.monotonic()
        if self.screen.rows and wait > 0:
            time.sleep(wait)
        self.screen.draw([[(title, DIM)], *lines[-room:]])


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


def block(stream: TextIO) -> str:
    """What stands for an undecided place: a shaded block, or ``_`` where there is none."""
    return "░" if printable("░", stream) == "░" else "_"


def _marked(text: str) -> str:
    """A piece with a mark before its first visible character."""
    bare = text.lstrip()
    return f"{text[: len(text) - len(bare)]}~{bare}" if bare else text
