"""Reads log-probabilities in the two forms in which servers write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from partsong.reasoning.remote.errors import GarbledError

__all__ = ["DrawnToken", "drawn_tokens"]

#: Log-probability of a drawn token, and those of the alternatives, the likeliest first.
DrawnToken = tuple[float, tuple[float, ...]]

#: Stands for a probability of 0, because JSON has no infinity.
_LOWEST = -9999.0


def drawn_tokens(logprobs: Any) -> list[DrawnToken]:
    """Reads the ``logprobs`` of a choice.

    Args:
        logprobs: ``{"content": [{"logprob": ..., "top_logprobs": [...]}, ...]}`` as in chats, or
            ``{"token_logprobs": [...], "top_logprobs": [{...}, ...]}`` as in plain completions, or None.

    Raises:
        GarbledError: it has neither form.

    >>> drawn_tokens({"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}]})
    [(-0.5, (-0.5, -1.0))]
    """
    if logprobs is None:
        return []
    try:
        if logprobs.get("content") is not None:
            return [(_number(token["logprob"]), _ranked(token.get("top_logprobs"))) for token in logprobs["content"]]
        drawn = logprobs.get("token_logprobs") or []
        others = logprobs.get("top_logprobs") or [None] * len(drawn)
        return [(_number(own), _ranked(top)) for own, top in zip(drawn, others, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GarbledError(f"the server's log-probabilities cannot be read: {error!r}") from error


def _ranked(top: Any) -> tuple[float, ...]:
    if top is None:
        return ()
    values = top.values() if isinstance(top, Mapping) else [one["logprob"] for one in top]
    return tuple(sorted(map(_number, values), reverse=True))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{value!r} is not a log-probability")
    return max(float(value), _LOWEST)
