"""Texts a strategy speaks to the model with, as data: templates whose gaps take plain text or earlier answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from string import Formatter

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Message, Piece

__all__ = ["FIRST", "Prompts", "ask", "fill", "listed", "numbered"]

#: A first draft, wherever later ones are made from it.
FIRST = "Solve the following problem. Show your work in short, and end with the final answer.\n\nProblem:\n{question}"

_ITEM = re.compile(r"^\s*(?:[-*•]|\(?\d{1,2}[.):])\s+(.*\S)\s*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The templates of a strategy. Gaps are written ``{name}``, braces of the text itself doubled.

    A model that is used to another language or form is driven by an instance with other texts; each template keeps
    the gaps of the default, for they carry the question and what earlier calls said.
    """

    def validate(self) -> None:
        """Refuses templates with other gaps than the default's.

        Raises:
            ArgumentError: names the template and its gaps.
        """
        for knob in fields(self):
            found, wanted = _gaps(knob.name, getattr(self, knob.name)), _gaps(knob.name, str(knob.default))
            if found != wanted:
                has, needs = (", ".join(f"{{{gap}}}" for gap in sorted(gaps)) or "no gaps" for gaps in (found, wanted))
                raise ArgumentError(f"prompt {knob.name} has {has}; it needs {needs}")


def _gaps(name: str, template: str) -> set[str]:
    try:
        return {gap for _, gap, _, _ in Formatter().parse(template) if gap is not None}
    except ValueError as error:
        raise ArgumentError(f"prompt {name} cannot be read: {error}; write braces of the text twice") from error


def fill(template: str, **gaps: str | Piece | Sequence[str | Piece]) -> tuple[str | Piece, ...]:
    """A template with its gaps filled; what fills them is never read as a template itself.

    >>> fill("Check {claim} twice", claim=Piece("2 + 2 = 4", "draft#0"))
    ('Check ', Piece(text='2 + 2 = 4', source='draft#0'), ' twice')
    """
    pieces: list[str | Piece] = []
    for literal, gap, _, _ in Formatter().parse(template):
        if literal:
            pieces.append(literal)
        if gap is not None:
            value = gaps[gap]
            pieces += [value] if isinstance(value, str | Piece) else value
    return tuple(pieces)


def ask(template: str, **gaps: str | Piece | Sequence[str | Piece]) -> list[Message]:
    """A chat of one user message: a filled template."""
    return [Message("user", fill(template, **gaps))]


def numbered(template: str, completions: Sequence[Completion | Piece]) -> list[str | Piece]:
    """Answers one after the other, each in a template with the gaps ``{number}``, from 1, and ``{text}``."""
    pieces: list[str | Piece] = []
    for place, item in enumerate(completions):
        text = item.piece if isinstance(item, Completion) else item
        pieces += fill(template, number=str(place + 1), text=text)
    return pieces


def listed(text: str) -> list[str]:
    r"""The items of a list in a text: lines that begin with a bullet or a number; without any, all lines.

    >>> listed("Sure:\n1. first\n2) second\n")
    ['first', 'second']
    """
    lines = text.splitlines()
    found = [match.group(1) for match in map(_ITEM.match, lines) if match]
    return found or [line.strip() for line in lines if line.strip()]
