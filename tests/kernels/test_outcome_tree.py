"""What is prepared for the outcomes of a step: the likeliest first, each once, and kept where the text goes there."""

from __future__ import annotations

import random

from partsong.kernels.speculation.lengths import AcceptedLengths
from partsong.kernels.speculation.outcome_tree import OutcomePlace, OutcomeTree, outcome_rates

LENGTH = 3


def grown(fan_out: int, seed: int = 0) -> OutcomeTree:
    """A tree with a draft and everything that is prepared behind it; tokens are drawn at random."""
    tree, dice = OutcomeTree(outcome_rates(fan_out), LENGTH), random.Random(seed)
    tree.take([1])
    for _ in range(LENGTH):
        tree.end.expand(dice.sample(range(100), fan_out))
    tree.draft(LENGTH)
    while places := tree.unknown(limit=50):
        places[0][1].expand(dice.sample(range(100), fan_out))
    return tree


def places_of(tree: OutcomeTree) -> list[OutcomePlace]:
    places, stack = list[OutcomePlace](), [tree._root]
    while stack:
        place = stack.pop()
        places.append(place)
        stack += place.children
    return places


def test_the_likeliest_places_come_first_and_each_once() -> None:
    tree = OutcomeTree(outcome_rates(3), LENGTH)
    tree.take([1])
    for _ in range(LENGTH):
        tree.end.expand([7, 8, 9])
    tree.draft(LENGTH)
    places = tree.unknown(limit=50)
    chances = [chance for chance, _ in places]
    assert chances == sorted(chances, reverse=True)
    paths = [tuple(tree.path(place)) for _, place in places]
    assert len(set(paths)) == len(paths)
    # Behind every guess of the draft the second and third tokens, and behind its last one the first as well.
    assert set(paths) >= {(7, 7, 7), (8,), (9,), (7, 8), (7, 9), (7, 7, 8)}
    # The further into the draft, the less is prepared: the third token at its last place is too unlikely by far.
    assert chances[paths.index((8,))] > chances[paths.index((7, 8))] > chances[paths.index((7, 7, 8))]


def test_paths_leave_the_draft_once_and_end_with_the_draft_after_it() -> None:
    tree = grown(3)
    for place in places_of(tree):
        if not place.children:
            continue
        path, here, left = tree.path(place), tree._root, 0
        for token in path:
            left += here.children[0].token != token
            here = next(child for child in here.children if child.token == token)
        assert left <= 1 and len(path) < LENGTH + 1 + LENGTH


def test_limits_leave_out_what_a_text_has_no_room_for() -> None:
    tree = OutcomeTree(outcome_rates(2), LENGTH)
    tree.take([1])
    tree.end.expand([7, 8])
    assert tree.unknown(limit=1) == [] and tree.draft(0).tokens == () and len(tree.unknown(limit=2)) == 2


def test_a_forward_reads_each_guess_once_behind_the_unread_tokens() -> None:
    tree = OutcomeTree(outcome_rates(2), LENGTH)
    tree.take([1])
    tree.end.expand([7, 8])
    tree.end.expand([5, 6])
    places = [tree._root.children[0].children[0], tree._root.children[0].children[1], tree._root]
    feed, nodes = tree.feed([3, 4], places)
    assert (feed.tokens, feed.parents) == ((3, 4, 7, 5, 6), (0, 1, 2, 3, 3)) and nodes == [4, 5, 2]


def test_what_was_prepared_is_kept_where_the_text_goes_there() -> None:
    for seed in range(20):
        tree = grown(3, seed)
        place, dice = tree._root, random.Random(seed)
        outcome = list[int]()
        for _ in range(dice.randrange(1, LENGTH + 1)):
            place = place.children[0]
            outcome.append(place.token)
        outcome.append(place.children[0].token)
        after = place.children[0]
        assert tree.take(outcome) == bool(after.children)
        assert tree._root is after and tree.depth_of(after) == 0 and tree.path(after) == []


def test_an_unforeseen_outcome_leaves_nothing_and_rates_learn_from_it() -> None:
    tree = grown(2)
    before = tree.rates[1]
    assert not tree.take([1000]) and tree.depth == 0
    assert tree.rates[1] < before
    assert not tree.take([5, 6]) and tree.end.place == 4


def test_lengths_are_counted_where_steps_begin() -> None:
    lengths = AcceptedLengths()
    for place, tokens in ((499, 4), (503, 1), (504, 2)):
        lengths.see(place, tokens)
    assert lengths.means() == {0: 4.0, 500: 1.5}
