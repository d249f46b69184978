"""Covering arrays: instead of every case of a product, few in which every two values that can meet do meet.

A product of strategies, models, numbers of ranks, types and sizes has thousands of cases, and a fault nearly always
shows wherever two of its values come together. `pytest --full` (`make test-full`) runs whole products.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Any, ...])
Pair = tuple[tuple[int, Any], ...]

#: Whether whole products run. tests/conftest.py sets it before any test file is read.
FULL = False
#: Which part of the full suite runs, and how many parts there are. tests/conftest.py sets it, too.
SHARD = (0, 1)


def pairs(cases: Iterable[tuple[Any, ...]]) -> set[Pair]:
    """Every two values that meet in one of the cases, each with the number of its factor."""
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def covering(
    product: Iterable[Case], prefer: Callable[[Case], Any] = lambda case: 0, beside: Iterable[Case] = ()
) -> list[Case]:
    """Takes cases of a product until every two values that meet anywhere in it have met; the same ones in every run.

    Each time the case with most new pairs is taken. Where several have as many, it is the one with the smallest
    `prefer`, and then the one a checksum picks, so that the values of the other factors take turns.

    Args:
        product: all cases that are possible, each a value of every factor.
        prefer: which of two cases to take, other things being equal.
        beside: cases that run anyway; what meets in them needs no other case.
    """
    cases = list(product)
    missing = pairs(cases) - pairs(beside)
    queue = [(-(len(case) ** 2), prefer(case), zlib.crc32(repr(case).encode()), n) for n, case in enumerate(cases)]
    heapq.heapify(queue)
    taken = set()
    while missing:
        # What a case would add only ever shrinks: one that still adds most after a second look is the best of all.
        *_, number = candidate = heapq.heappop(queue)
        fresh = pairs([cases[number]]) & missing
        current = (-len(fresh), *candidate[1:])
        if queue and queue[0] < current:
            heapq.heappush(queue, current)
        else:
            taken.add(number)
            missing -= fresh
    return [cases[number] for number in sorted(taken)]


def dealt(names: Iterable[str]) -> list[str]:
    """The names whose cases this part of the full suite runs: those of a file in `file_seconds.IN_EVERY_SHARD`."""
    number, count = SHARD
    return [name for place, name in enumerate(names) if place % count == number]


def taking_turns(names: Iterable[str], kinds: Iterable[tuple[str, ...]]) -> set[tuple[str, str]]:
    """Pairs every name with one value of each kind: those of a kind work alike, so they take turns."""
    return {(kind[place % len(kind)], name) for kind in kinds for place, name in enumerate(names)}


def chosen(
    product: Iterable[Case], prefer: Callable[[Case], Any] = lambda case: 0, beside: Iterable[Case] = ()
) -> list[Case]:
    """The cases of a product to run: all of them under ``pytest --full``, else those of `covering`."""
    return list(product) if FULL else covering(product, prefer, beside)
