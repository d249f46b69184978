"""Marks places where no token can be drawn, so that nobody takes the first token of the vocabulary for a choice.

Logits with a NaN or of +inf (broken weights, or float16 that overflowed) are no distribution, and where a mask forbids
every token there is nothing to choose from. An argmax names a token all the same. Here such a draw is a negative
number, which no vocabulary has, in place of a token: it costs no pass over the logits and no wait for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ALL_FORBIDDEN", "FLOOR", "NOT_A_NUMBER", "marked", "why_no_token"]

#: Stands for the token where the largest logit is NaN or infinite.
NOT_A_NUMBER = -1
#: Stands for the token where every logit is -inf, or as good as that.
ALL_FORBIDDEN = -2
#: The largest logit that forbids a token: masks of float32 and bfloat16 often hold their least number, not -inf.
FLOOR = -1e38


def marked(tokens: Tensor, largest: Tensor) -> Tensor:
    """Puts a negative number in place of tokens that nobody could draw.

    Args:
        tokens: int64 of any shape.
        largest: of the same shape, the largest logit at each place, or another number that is NaN or infinite where
            that is.

    >>> marked(torch.tensor([4, 0, 0]), torch.tensor([1.5, torch.nan, -torch.inf])).tolist()
    [4, -1, -2]
    """
    reason = torch.where(largest <= FLOOR, ALL_FORBIDDEN, NOT_A_NUMBER)
    return torch.where((largest > FLOOR) & largest.isfinite(), tokens, reason)


def why_no_token(token: int, row: int | None, position: int) -> str:
    """Says in one line why a row of a batch (None: a text of its own) has no token at a position.

    Args:
        token: the negative number that was drawn.
        row: which of the batch.
        position: within the whole text, prompt included, from 0.

    >>> why_no_token(ALL_FORBIDDEN, 1, 7)
    'no token for position 7 of row 1: every token is forbidden there; allow one'
    """
    assert token < 0
    where = f"no token for position {position}" + ("" if row is None else f" of row {row}")
    if token == ALL_FORBIDDEN:
        return f"{where}: every token is forbidden there; allow one"
    return (
        f"{where}: the model's logits there are NaN or infinite; look for such numbers in its weights, "
        f"or use bfloat16 or float32 if float16 overflowed"
    )
