"""Lists the drafters that every loop can use, by name, and reads a user's choice of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from partsong.errors import ArgumentTypeError
from partsong.kernels.speculation.drafter import DrafterKnobs
from partsong.kernels.speculation.jacobi import Jacobi
from partsong.kernels.speculation.ngram import Ngram
from partsong.kernels.speculation.published.drafter import Published
from partsong.knobs import by_name, parse_knobs

__all__ = ["COMMON", "MODEL_FREE", "drafters_of"]

#: Name -> knobs, of those that need no model.
MODEL_FREE = by_name((Ngram, Jacobi))
#: Name -> knobs, with those that read a model's states but run nothing else than their own layers.
COMMON = {**MODEL_FREE, **by_name((Published,))}


def drafters_of(
    asked: DrafterKnobs | str | Iterable[DrafterKnobs | str] | None, known: Mapping[str, Any] = COMMON
) -> tuple[DrafterKnobs, ...]:
    """Reads a user's choice of drafters.

    Args:
        asked: knobs, or texts ``NAME[:key=value,...]``; one or several, or None.
        known: the classes that a text may name.

    Raises:
        ArgumentError: there is no such drafter, or it has no such knob.
        ArgumentTypeError: something else was given.

    >>> drafters_of("ngram:num=2")
    (Ngram(num=2, length=16),)
    """
    if asked is None:
        return ()
    several = [asked] if isinstance(asked, str | DrafterKnobs) else list(asked)
    read = [parse_knobs(each, known, "drafter") if isinstance(each, str) else each for each in several]
    for each in read:
        if not isinstance(each, DrafterKnobs):
            raise ArgumentTypeError(f"a drafter is one of {', '.join(known)}, found {type(each).__name__}")
        each.validate()
    return tuple(read)
