"""Rows take turns: everything reaches everyone, in steps of about one size that are no larger than the budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from partsong.parallel.exchange.rotation import count_rows, rotation_of
from partsong.parallel.ranks.shards import split_sizes

PORTIONS = ("0.05", "0.3", "0.7", "1.3", "2")
FARS = ("0.2", "0.5", "1")

Runs = tuple[tuple[str, int], ...]


def runs_of(images: int, text: int, ranks: int) -> tuple[Runs, ...]:
    parts = zip(split_sizes(text, ranks), split_sizes(images, ranks), strict=True)
    return tuple((("text", words), ("image", tokens)) for words, tokens in parts)


def layouts() -> Iterator[tuple[Runs, ...]]:
    for ranks in (2, 3, 4, 8):
        yield runs_of(41, 0, ranks)
        yield runs_of(64, 21, ranks)
    between = (("text", 3), ("image", 7), ("text", 2), ("image", 6))
    yield (between, between, between[:2])


def budget(runs: tuple[Runs, ...], portion: str) -> int:
    """Rows that the busiest rank would send if each sent what lies near, and text."""

    def sent(rank: int) -> int:
        images = sum(length for stream, length in runs[rank] if stream == "image")
        text = sum(length for stream, length in runs[rank] if stream == "text")
        reaches = (Fraction(portion) - abs(peer - rank) + 1 for peer in range(len(runs)) if peer != rank)
        return sum(text + math.ceil(min(max(reach, Fraction(0)), Fraction(1)) * images) for reach in reaches)

    return max(map(sent, range(len(runs))))


@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("far", FARS)
def test_every_row_reaches_every_rank_once_in_all_turns(portion: str, far: str) -> None:
    for runs in layouts():
        for sender, own in enumerate(runs):
            rotation, total = rotation_of(runs, sender, float(portion), float(far)), sum(length for _, length in own)
            for viewer in range(len(runs)):
                always = [row for part in rotation.always[viewer] for row in range(part.start, part.stop)]
                turned = [row for t in rotation.blocks for part in t[viewer] for row in range(part.start, part.stop)]
                assert sorted(always + turned) == list(range(total)) * (viewer != sender)


@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("far", FARS)
def test_steps_are_within_the_budget_and_nearly_alike(portion: str, far: str) -> None:
    for runs in layouts():
        for sender in range(len(runs)):
            rotation = rotation_of(runs, sender, float(portion), float(far))
            counts = [sum(rotation.counts(step, layer=3)) for step in range(len(rotation.blocks))]
            # No rank sends the others less than a row each, even where the budget is smaller.
            assert max(counts) <= max(budget(runs, portion), len(runs) - 1 + sum(map(count_rows, rotation.always)))
            assert max(counts) - min(counts) <= rotation.taken * (len(runs) - 1)


@pytest.mark.parametrize("far", FARS)
def test_a_circle_of_steps_refreshes_all_rows_equally_often(far: str) -> None:
    for runs in layouts():
        for sender in range(len(runs)):
            rotation = rotation_of(runs, sender, 0.3, float(far))
            due = [rotation.due(step, layer=1) for step in range(len(rotation.blocks))]
            for viewer in (viewer for viewer in range(len(runs)) if viewer != sender):
                sent = Counter(row for step in due for part in step[viewer] for row in range(part.start, part.stop))
                always = {row for part in rotation.always[viewer] for row in range(part.start, part.stop)}
                assert {count for row, count in sent.items() if row not in always} <= {rotation.taken}
                assert {count for row, count in sent.items() if row in always} <= {len(rotation.blocks)}


def test_the_budget_is_spent() -> None:
    runs = runs_of(40, 0, 4)  # ten rows for each of three ranks, and the busiest would send three to each side
    for sender in range(4):
        rotation = rotation_of(runs, sender, 0.3, 1.0)
        assert (rotation.taken, len(rotation.blocks)) == (1, 5)  # two rows for each of the three in a step
    rotation = rotation_of(runs_of(64, 0, 2), 0, 0.3, 1.0)  # ten rows of 32 in each step
    assert (rotation.taken, len(rotation.blocks)) == (5, 16)


def test_the_nearest_are_sent_in_every_step() -> None:
    runs = runs_of(40, 8, 4)
    rotation = rotation_of(runs, 1, 0.5, 0.4)  # rows 0 and 1 are text; of the five nearest, three are sent always
    assert rotation.always == ((slice(2, 5),), (), (slice(9, 12),), ())


def test_layers_take_turns_at_different_times() -> None:
    rotation = rotation_of(runs_of(40, 0, 2), 0, 0.25, 1.0)
    starts = Counter(rotation.due(step=7, layer=layer)[1][0].start for layer in range(len(rotation.blocks) * 3))
    assert set(starts.values()) == {3} and len(starts) == len(rotation.blocks)
