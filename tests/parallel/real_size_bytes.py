"""Counts the bytes of a call at a real size anew, by a formula for every way to cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partsong import Ring, Ulysses
from partsong.parallel import Strategy
from tests.parallel.real_size import Attends, RealSize


def parts(total: int, ranks: int) -> list[int]:
    """Shares of nearly the same size, the larger ones first."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def held(of: Attends, size: RealSize, ranks: int) -> list[int]:
    """The tokens of every rank: of each stream its share, and of an image its share of runs of rows."""
    runs = None if size.grid is None else size.grid // size.step

    def shares(tokens: int) -> list[int]:
        return parts(tokens, ranks) if runs is None else [mine * tokens // runs for mine in parts(runs, ranks)]

    return [sum(each) for each in zip(*(shares(tokens) for tokens in of.tokens), strict=True)]


def heads_of(of: Attends, ranks: int) -> list[tuple[int, int]]:
    """The query heads of every rank, and the key/value heads that these read."""
    group, first, shares = of.heads // (of.kv_heads or of.heads), 0, []
    for queries in parts(of.heads, ranks):
        read = {head // group for head in range(first, first + queries)}
        shares.append((queries, len(read)))
        first += queries
    return shares


def swapped(of: Attends, tokens: Sequence[int], rank: int) -> int:
    """Numbers that one rank sends in Ulysses: of its tokens the others' heads, and of its heads the others' tokens."""
    shares = heads_of(of, len(tokens))
    there = sum(queries + 2 * keys for peer, (queries, keys) in enumerate(shares) if peer != rank)
    return (tokens[rank] * there + shares[rank][0] * (sum(tokens) - tokens[rank])) * of.dim


def passed_on(tokens: Sequence[int], rank: int) -> int:
    """Tokens whose keys one rank sends in a ring: all but those of the rank after it, which has them."""
    return sum(tokens) - tokens[(rank + 1) % len(tokens)]


def attended(of: Attends, size: RealSize, strategies: Sequence[Strategy], ranks: int, rank: int) -> int:
    """Bytes that one rank sends in a self-attention of one sample."""
    tokens, keys = held(of, size, ranks), 2 * (of.kv_heads or of.heads) * of.dim
    kinds = {type(strategy) for strategy in strategies}
    if kinds == {Ulysses}:
        numbers = swapped(of, tokens, rank)
    elif kinds == {Ring}:
        numbers = passed_on(tokens, rank) * keys
    elif kinds == {Ulysses, Ring}:
        side = math.isqrt(ranks)
        line, place = divmod(rank, side)
        lines = [sum(tokens[start : start + side]) for start in range(0, ranks, side)]
        queries, read = heads_of(of, side)[place]
        # Where a rank's queries share keys with another rank's, each of its queries gets keys of its own.
        whole = all(count * (of.heads // (of.kv_heads or of.heads)) == own for own, count in heads_of(of, side))
        own_keys = 2 * (read if whole else queries) * of.dim
        numbers = swapped(of, tokens[line * side : (line + 1) * side], place) + passed_on(lines, line) * own_keys
    else:
        numbers = tokens[rank] * (ranks - 1) * keys
    return numbers * of.itemsize


def of_tokens(size: RealSize, strategies: Sequence[Strategy], ranks: int, rank: int) -> int:
    """Bytes that one rank sends in a call with one sample whose tokens or rows are cut."""
    total = 0
    for of in size.attends:
        masks = held(of, size, ranks)[rank] * of.mask * (ranks - 1)
        total += of.layers * (attended(of, size, strategies, ranks, rank) + masks)
    for of in size.gathers:
        mine = parts(of.tokens, ranks)[rank]
        if size.grid is not None:
            mine = parts(size.grid // size.step, ranks)[rank] * (of.tokens // size.grid) * size.step
        total += of.times * mine * of.numbers * of.itemsize * (ranks - 1)
    for row in size.rows:
        numbers = row.up * (rank > 0) + row.down * (rank < ranks - 1) + row.all * (ranks - 1)
        total += row.layers * numbers * row.itemsize
    return total


def of_samples(size: RealSize, batch: int, ranks: int, rank: int) -> int:
    """Bytes that one rank sends where samples are shared out: its own results, to every other rank."""
    numbers = sum(math.prod(shape) for shape in size.output)
    return parts(batch, ranks)[rank] * numbers * 2 * (ranks - 1)


def expected(size: RealSize, strategies: Sequence[Strategy], ranks: int, batch: int) -> list[int]:
    """Bytes of every rank in a step, with the four numbers by which all ranks see that their latents are the same."""
    if strategies[0].axes[0] in ("cfg", "data"):
        moved = [of_samples(size, batch, ranks, rank) for rank in range(ranks)]
    else:
        moved = [of_tokens(size, strategies, ranks, rank) for rank in range(ranks)]
    return [sent + 4 * 8 * (ranks - 1) for sent in moved]
