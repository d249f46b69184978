"""Finds the program in a model's text: the last fenced block."""

from __future__ import annotations

import re

from partsong.reasoning.answers.extract import visible_text

__all__ = ["final_code"]

_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([\w+-]{0,20})[^\n]{0,200}$", re.MULTILINE)


def final_code(text: str, language: str | None = "python") -> str | None:
    r"""Returns the last fenced block of code in a language or without a label; an unclosed one extends to the end.

    Args:
        text: the text.
        language: label of the block, in lower case; None takes any.

    >>> final_code("Try this:\n```python\nx = 1\n```\nDone.")
    'x = 1\n'
    """
    visible, blocks, begin = visible_text(text), [], None
    for fence in _FENCE.finditer(visible):
        if begin is None:
            begin = (fence[1].lower(), fence.end() + 1)
        elif not fence[1]:
            blocks.append((begin[0], visible[begin[1] : fence.start()]))
            begin = None
    if begin is not None:
        blocks.append((begin[0], visible[begin[1] :]))
    labels = {language, "", *({"py", "python3"} if language == "python" else ())}
    return next((code for label, code in reversed(blocks) if language is None or label in labels), None)
