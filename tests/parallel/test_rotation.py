"""Rows take turns: everything reaches everyone, in steps of the same size that are no larger than the budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from partsong.parallel.exchange.rotation import rotation_of
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
                turned = [row for t in rotation.turns for part in t[viewer] for row in range(part.start, part.stop)]
                assert sorted(always + turned) == list(range(total)) * (viewer != sender)


@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("far", FARS)
def test_steps_are_within_the_budget_and_alike(portion: str, far: str) -> None:
    for runs in layouts():
        for sender in range(len(runs)):
            rotation = rotation_of(runs, sender, float(portion), float(far))
            counts = [rotation.count(step, layer=3) for step in range(len(rotation.turns))]
            assert max(counts) <= budget(runs, portion)
            assert max(counts) - min(counts) <= 1


def test_as_few_turns_as_the_budget_allows() -> None:
    runs = runs_of(40, 0, 4)  # ten rows each, of which the busiest sends three to each side: six in a step
    assert [len(rotation_of(runs, sender, 0.3, 1.0).turns) for sender in range(4)] == [5] * 4


def test_the_nearest_are_sent_in_every_step() -> None:
    runs = runs_of(40, 8, 4)
    rotation = rotation_of(runs, 1, 0.5, 0.4)  # rows 0 and 1 are text; of the five nearest, three are sent always
    assert rotation.always == ((slice(2, 5),), (), (slice(9, 12),), ())


def test_layers_take_turns_at_different_times() -> None:
    rotation = rotation_of(runs_of(40, 0, 2), 0, 0.25, 1.0)
    starts = Counter(rotation.due(step=7, layer=layer)[1][0].start for layer in range(len(rotation.turns) * 3))
    assert set(starts.values()) == {3} and len(starts) == len(rotation.turns)
