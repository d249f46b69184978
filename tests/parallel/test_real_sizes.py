"""Every row at its published model's real size: `predict` makes the calls, and a formula counts the bytes anew."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from partsong import CfgParallel, DataParallel, DisplacedPatch, Ring, SyncPatch, Ulysses
from partsong.errors import UnsupportedError
from partsong.parallel import ADAPTERS, Strategy, predict
from tests import covering
from tests.parallel.real_size import Attends, RealSize, real
from tests.parallel.real_sizes_frames import OTHERS
from tests.parallel.real_sizes_images import CROSS, JOINT
from tests.parallel.real_sizes_pairs import PAIRS
from tests.parallel.real_sizes_sequences import SEQUENCES
from tests.parallel.real_sizes_sounds import SOUNDS
from tests.parallel.real_sizes_uncut import UNCUT
from tests.parallel.real_sizes_unets import ROWS
from tests.parallel.real_sizes_video_unets import VIDEO_UNETS
from tests.parallel.real_sizes_videos import HUNYUAN, WAN

TABLES = (CROSS, JOINT, PAIRS, SEQUENCES, WAN, HUNYUAN, OTHERS, SOUNDS, ROWS, VIDEO_UNETS, UNCUT)
SIZES = {size.model: size for table in TABLES for size in table}

#: Name -> the strategies, ranks, and samples of a call.
PLANS: dict[str, tuple[tuple[Strategy, ...], int, int]] = {
    "ulysses": ((Ulysses(),), 8, 1),
    "ring": ((Ring(),), 8, 1),
    "sync-patch": ((SyncPatch(),), 8, 1),
    "displaced-patch": ((DisplacedPatch(),), 8, 1),
    "cfg-parallel": ((CfgParallel(),), 8, 2),
    "data-parallel": ((DataParallel(),), 8, 10),
    "ring x ulysses": ((Ulysses(degree=8), Ring(degree=8)), 64, 1),
}


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


def fits(size: RealSize, strategies: Sequence[Strategy], ranks: int) -> bool:
    """Whether the strategies have a form on a model, whose rows or frames are enough for the ranks."""
    if any(strategy.refuses(ADAPTERS[size.model]) for strategy in strategies):
        return False
    if strategies[0].axes[0] in ("cfg", "data"):
        return size.batches
    return size.grid is None or size.grid // size.step >= ranks


CASES = [
    (name, plan)
    for name, size in SIZES.items()
    for plan, (strategies, ranks, _) in PLANS.items()
    if fits(size, strategies, ranks)
]


def rotated() -> list[tuple[str, str]]:
    """Every fifth model once, its turn deciding under which of its plans; what takes longest is left out.

    These are plans of 64 ranks, and `DisplacedPatch`, whose warm-up makes a prediction of several calls. A model takes
    a second, and the bytes of its small twin are counted elsewhere.
    """
    quick = [plan for plan, (_, ranks, _) in PLANS.items() if ranks == 8 and plan != "displaced-patch"]
    plans = {name: [plan for model, plan in CASES if model == name and plan in quick] for name in SIZES}
    return [(name, own[turn // 5 % len(own)]) for turn, (name, own) in enumerate(plans.items()) if turn % 5 == 3]


def test_every_row_has_a_real_size() -> None:
    assert set(SIZES) == {adapter.model for adapter in ADAPTERS.values() if not adapter.mixes}


@pytest.mark.parametrize(("name", "plan"), CASES if covering.FULL else rotated())
def test_bytes_of_a_real_size_are_those_of_the_formula(name: str, plan: str) -> None:
    size, (strategies, ranks, batch) = SIZES[name], PLANS[plan]
    if size.values is not None:
        with pytest.raises(UnsupportedError, match="takes more than shapes"):
            predict(size.build(), *strategies, ranks=ranks, **size.inputs(batch))
        return
    told = predict(size.build(), *strategies, ranks=ranks, **size.inputs(batch))
    assert told.bytes_per_step == expected(size, strategies, ranks, batch)


def test_fewer_runs_of_rows_than_ranks_are_refused() -> None:
    # 256 x 256 pixels, as ali-vilab/text-to-video-ms-1.7b makes them, are four rows at the coarsest level.
    size = SIZES["UNet3DConditionModel"]
    small = size.inputs(1) | {"sample": real(1, 4, 16, 32, 32)}
    with pytest.raises(UnsupportedError, match="4 rows, too few to cut over 8 ranks"):
        predict(size.build(), SyncPatch(), ranks=8, **small)
