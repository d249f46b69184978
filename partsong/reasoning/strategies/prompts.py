"""Keeps the prompts of thinking methods as data: templates whose gaps take plain text or earlier answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from string import Formatter

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Message, Piece

__all__ = ["FIRST", "Prompts", "ask", "fill", "listed", "numbered"]

#: Asks for a first draft, in methods that rewrite it later.
FIRST = "Solve the following problem. Show your work in short, and end with the final answer.\n\nProblem:\n{question}"

_ITEM = re.compile(r"^\s*(?:[-*•]|\(?\d{1,2}[.):])\s+(.*\S)\s*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Holds the templates of a strategy. Gaps are written ``{name}``; braces of the text itself are doubled.

    For a model that is used to another language or form, make an instance with other texts. Each template keeps the
    gaps of the default, because they carry the question and the answers of earlier calls.
    """

    def validate(self) -> None:
        """Refuses templates whose gaps differ from those of the default.

        Raises:
            ArgumentError: names the template and its gaps.
        """
        defaults = {field.name: str(field.default) for field in fields(self)}
        for name, template in asdict(self).items():
            gaps, needed = _gaps(name, template), _gaps(name, defaults[name])
            if gaps != needed:
                raise ArgumentError(f"prompt {name} has {_in_braces(gaps)}; it needs {_in_braces(needed)}")


def _gaps(name: str, template: str) -> set[str]:
    try:
        return {gap for _, gap, _, _ in Formatter().parse(template) if gap is not None}
    except ValueError as error:
        raise ArgumentError(f"prompt {name} cannot be read: {error}; write braces of the text twice") from error


def _in_braces(gaps: set[str]) -> str:
    return ", ".join(f"{{{gap}}}" for gap in sorted(gaps)) or "no gaps"


def fill(template: str, **gaps: str | Piece | Sequence[str | Piece]) -> tuple[str | Piece, ...]:
    """Fills the gaps of a template; what fills them is never read as a template itself.

    >>> fill("Check {claim} twice", claim=Piece("2 + 2 = 4", "draft#0"))
    ('Check ', Piece(text='2 + 2 = 4', source='draft#0', tokens=None), ' twice')
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
    """Returns a chat of one user message, a filled template."""
    return [Message("user", fill(template, **gaps))]


def numbered(template: str, completions: Sequence[Completion | Piece]) -> list[str | Piece]:
    """Puts answers one after the other, each in a template with the gaps ``{number}``, from 1, and ``{text}``."""
    pieces: list[str | Piece] = []
    for place, item in enumerate(completions):
        text = item.piece if isinstance(item, Completion) else item
        pieces += fill(template, number=str(place + 1), text=text)
    return pieces


def listed(text: str) -> list[str]:
    r"""Returns the items of a list in a text: lines that begin with a bullet or a number; without any, all lines.

    >>> listed("Sure:\n1. first\n2) second\n")
    ['first', 'second']
    """
    lines = text.splitlines()
    items = [match.group(1) for match in map(_ITEM.match, lines) if match]
    return items or [line.strip() for line in lines if line.strip()]
