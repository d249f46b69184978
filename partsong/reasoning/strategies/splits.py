"""Describes requests in parts, one template over many pieces of data, and reads a model's proposal of one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["ProblemSplit", "read_split"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSplit:
    """Holds a request in parts.

    Attributes:
        template: the request for one part, with ``[DATA]`` where its data go.
        data: the data of each part.
        context: what every part needs to know.
    """

    template: str
    data: tuple[str, ...]
    context: str = ""


def read_split(text: str, most: int) -> ProblemSplit | None:
    """Reads a model's proposal of a split into at most `most` parts; None where it proposes nothing that can be used.

    The proposal is a JSON object in the text, which is parsed and never evaluated.

    >>> read_split('{"template": "Translate: [DATA]", "data": ["one", "two"]}', 8).data
    ('one', 'two')
    """
    try:
        plan: Any = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(plan, dict) or plan.get("serial") or not isinstance(plan.get("template"), str):
        return None
    data, count, context = plan.get("data"), plan.get("n"), plan.get("context") or ""
    if (data is None) == (count is None) or not isinstance(context, str):
        return None
    if isinstance(count, int) and not isinstance(count, bool):
        pieces = [str(i + 1) for i in range(min(max(count, 0), most + 1))]
    elif isinstance(data, list) and all(isinstance(piece, str | int | float) for piece in data):
        pieces = [str(piece) for piece in data]
    else:
        return None
    usable = 2 <= len(pieces) <= most and (data is None or "[DATA]" in plan["template"])
    return ProblemSplit(template=plan["template"], data=tuple(pieces), context=context) if usable else None
