"""Defines the tasks of the suite, each a small set of equally likely texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from partsong.evals.oracle.model import Support

__all__ = ["oracle_tasks"]


def _texts(name: str, texts: Iterable[Sequence[int]]) -> Support:
    return Support(name, torch.tensor(list(texts), dtype=torch.int64))


def _edits(verb: str, n: int) -> list[list[int]]:
    items, new = list(range(n)), n
    if verb == "insert":
        return [[*items[:i], new, *items[i:]] for i in range(n + 1)]
    return [[*items[:i], *([new] if verb == "replace" else []), *items[i + 1 :]] for i in range(n)]


def _squares(size: int) -> list[list[int]]:
    lines = list(itertools.permutations(range(size)))
    return [
        list(itertools.chain(*square))
        for square in itertools.product(lines, repeat=size)
        if all(len({line[c] for line in square}) == size for c in range(size))
    ]


def oracle_tasks() -> dict[str, Support]:
    """Returns the eight tasks of the suite, which show what parallel decoding can and cannot do.

    ``copy`` has one answer; ``replace``, ``insert`` and ``remove`` edit a list of 8 at a random place; ``shuffle`` has
    all orders of 6; ``latin`` all 4 x 4 Latin squares; ``pairs`` 8 independent pairs of equal bits; ``replace 15`` a
    longer list, on which fixed thresholds fail.
    """
    bits = itertools.product((0, 1), repeat=8)
    return {
        "copy": _texts("copy", [range(8)]),
        "replace": _texts("replace", _edits("replace", 8)),
        "insert": _texts("insert", _edits("insert", 8)),
        "remove": _texts("remove", _edits("remove", 8)),
        "shuffle": _texts("shuffle", itertools.permutations(range(6))),
        "latin": _texts("latin", _squares(4)),
        "pairs": _texts("pairs", ([bit for bit in row for _ in range(2)] for row in bits)),
        "replace 15": _texts("replace 15", _edits("replace", 15)),
    }
