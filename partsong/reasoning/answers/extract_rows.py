r"""Finds lists and grids in a model's text; the rules of `partsong.reasoning.answers.extract` hold here too.

>>> final_list("sorted: [1, 2.0, 'x']"), final_grid("Solution:\n1 2\n2 1", 2)
('[1, 2, x]', '12\n21')
"""

from __future__ import annotations

import re
from fractions import Fraction

from partsong.reasoning.answers.extract import last_boxed, visible_text

__all__ = ["final_grid", "final_list", "items_of"]

#: Most items of a list; longer ones do not count as answers.
_MAX_ITEMS = 2000
_PLAIN = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?")
_FRAME = re.compile(r"[\s|,;┃│║]+")
_RULE = re.compile(r"^[\s+|=\-─━┼┬┴├┤╂]*$")
_CELL = re.compile(r"[0-9A-Za-z._?]")


def final_list(text: str) -> str | None:
    r"""Returns the last list in square brackets that holds no other list, or the one in the last box.

    In a box it needs no brackets. Items lose their quotes, and numbers are spelled in one way.

    >>> final_list('["b", "a"]'), final_list(r"\boxed{3, 2, 1}"), final_list("3, 2, 1")
    ('[b, a]', '[3, 2, 1]', None)
    """
    boxed = last_boxed(text)
    searched = visible_text(text) if boxed is None else boxed
    begin, inner = None, None
    for bracket in re.finditer(r"[\[\]]", searched):
        if bracket.group() == "[":
            begin = bracket.end()
        elif begin is not None:
            begin, inner = None, searched[begin : bracket.start()]
    if inner is None:
        inner = None if boxed is None else boxed.replace(r"\{", "").replace(r"\}", "").strip("()")
    if inner is None or inner.count(",") >= _MAX_ITEMS:
        return None
    items = [_item(item) for item in inner.split(",")] if inner.strip() else []
    return None if "" in items else f"[{', '.join(items)}]"


def items_of(text: str) -> list[str]:
    """Returns the items of a list as `final_list` spells it.

    >>> items_of("[3, 2]"), items_of("[]")
    (['3', '2'], [])
    """
    inner = text.strip()[1:-1].strip()
    return [item.strip() for item in inner.split(",")] if inner else []


def _item(text: str) -> str:
    bare = text.strip().strip("'\"`*“”‘’").strip()  # noqa: RUF001
    return str(Fraction(bare)) if _PLAIN.fullmatch(bare) else bare


def final_grid(text: str, rows: int, columns: int | None = None) -> str | None:
    r"""Returns the last square of single characters, without the frames, bars, commas and blanks between them.

    Args:
        text: the text.
        rows: lines of the square.
        columns: characters of a line. Default: as many as lines.

    Returns:
        The lines, without blanks; None where no `rows` lines of that width follow each other.

    >>> final_grid("| 1 2 | 3 4 |\n+-----+-----+\n| 3 4 | 1 2 |", 2, 4)
    '1234\n3412'
    """
    width, run, best = columns or rows, [], None
    for line in visible_text(text).splitlines():
        if _RULE.match(line):
            continue
        cells = _FRAME.sub("", line.strip("`*[] ")) if len(line) <= 8 * width + 16 else ""
        if len(cells) == width and all(map(_CELL.match, cells)):
            run.append(cells)
        else:
            run = []
        if len(run) >= rows:
            best = run[-rows:]
    return None if best is None else "\n".join(best)
