"""What the drafters that read the text alone guess, and how many guesses a step verifies."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from partsong.errors import ArgumentError
from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.speculation.budget import within_budget
from partsong.kernels.speculation.costs import costs_by_tokens, usual_costs
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import Drafter, DraftText, Observation
from partsong.kernels.speculation.jacobi import Jacobi
from partsong.kernels.speculation.match import follow
from partsong.kernels.speculation.ngram import Ngram
from partsong.kernels.speculation.rates import Rates
from partsong.kernels.speculation.speculator import Speculator

GREEDY = TokenDraw(0.0, 1.0, seed=0, place=0)


def write(drafter: Drafter, answer: list[int], prompt: list[int]) -> tuple[int, list[DraftTree]]:
    """Lets a drafter guess along a text that is known, every guess verified; returns the steps and the drafts."""
    text, drafts = DraftText(list(prompt), GREEDY), list[DraftTree]()
    whole = prompt + answer
    while len(text.tokens) < len(whole):
        room = len(whole) - len(text.tokens) - 1
        (draft,) = drafter.propose([text], [room])
        assert max(draft.depths) <= room
        # The model draws the known token wherever the path is right, and -1 elsewhere.
        drawn = list[int]()
        for node in range(len(draft) + 1):
            path = [draft.tokens[each - 1] for each in draft.ancestors(node)[1:]]
            here = len(text.tokens) + len(path)
            drawn.append(whole[here] if whole[:here] == text.tokens + path and here < len(whole) else -1)
        match = follow(draft, drawn)
        text.tokens += match.tokens
        drafter.observe(text, Observation(draft, match))
        drafts.append(draft)
    assert text.tokens == whole
    drafter.forget(text)
    return len(drafts), drafts


def test_ngrams_copy_what_the_prompt_holds() -> None:
    passage = random.Random(4).sample(range(60), 60)
    steps, _ = write(Ngram(length=16).build(None, None), passage, [*passage, 99])
    # One step until the first token of the passage is there, then up to seventeen tokens a step.
    assert steps <= 1 + 1 + -(-59 // 17)


def test_a_text_that_repeats_is_guessed_past_its_end() -> None:
    ngram = Ngram(num=2, length=10).build(None, None)
    (draft,) = ngram.propose([DraftText([1, 2, 3, 1, 2, 3, 1, 2], GREEDY)], [8])
    assert draft.tokens == (3, 1, 2, 3, 1, 2, 3, 1)


def test_the_latest_and_the_most_frequent_continuation_are_guessed() -> None:
    ngram = Ngram(num=1, length=1).build(None, None)
    (draft,) = ngram.propose([DraftText([5, 7, 5, 7, 5, 8, 5], GREEDY)], [4])
    assert draft.tokens == (8, 7) and draft.parents == (0, 0)


def test_chances_of_ngrams_are_learned_where_nothing_is_sent() -> None:
    ngram = Ngram().build(None, None)
    text = DraftText([1, 2, 3, 4], GREEDY)

    noise = random.Random(0)
    ngram.propose([text], [1])
    for token in itertools.chain.from_iterable((4, noise.randrange(10, 40)) for _ in range(60)):
        text.tokens.append(token)
        ngram.observe(text, Observation(DraftTree(), follow(DraftTree(), [token])))
    text.tokens.append(4)  # anything has followed it
    ngram.observe(text, Observation(DraftTree(), follow(DraftTree(), [4])))
    (draft,) = ngram.propose([text], [1])
    assert draft.known_chances[0] < 0.06


def test_jacobi_goes_on_with_what_was_drawn_after_wrong_guesses() -> None:
    jacobi = Jacobi(window=4).build(None, None)
    text = DraftText([9], GREEDY)
    (draft,) = jacobi.propose([text], [10])
    assert draft.tokens == (9, 9, 9, 9)  # nothing is known yet
    match = follow(draft, [1, 2, 3, 4, 5])
    assert match.tokens == (1,)
    text.tokens += match.tokens
    jacobi.observe(text, Observation(draft, match))
    (draft,) = jacobi.propose([text], [10])
    assert draft.tokens[:4] == (2, 3, 4, 5)
    match = follow(draft, [2, 3, 7, 8, 9])  # two are right, the third is 7
    assert match.tokens == (2, 3, 7)
    text.tokens += match.tokens
    jacobi.observe(text, Observation(draft, match))
    (draft,) = jacobi.propose([text], [10])
    assert draft.tokens[:2] == (8, 9)


def test_jacobi_reaches_the_fixed_point_of_a_loose_text_soon() -> None:
    """Where each token depends on its place alone, the first draws are right, and a step gives a whole window."""
    answer = [place % 7 for place in range(40)]
    jacobi = Jacobi(window=8).build(None, None)
    text, steps = DraftText([6], GREEDY), 0
    while len(text.tokens) < 41:
        (draft,) = jacobi.propose([text], [40 - len(text.tokens)])
        drawn = [answer[min(len(text.tokens) - 1 + depth, 39)] for depth in draft.depths]
        match = follow(draft, drawn)
        text.tokens += match.tokens
        jacobi.observe(text, Observation(draft, match))
        steps += 1
    assert text.tokens[1:41] == answer and steps <= 12


@pytest.mark.parametrize("kind", [Ngram, Jacobi])
def test_any_text_is_written_and_no_longer_than_one_token_a_step(kind: type) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        prompt, answer = ([dice.randrange(3) for _ in range(dice.randrange(1, 30))] for _ in range(2))
        steps, _ = write(kind().build(None, None), answer, prompt)
        assert steps <= len(answer)


@some.composite
def drafts_with_chances(some_of: some.DrawFn) -> DraftTree:
    parents, tokens = list[int](), list[int]()
    for number in range(some_of(some.integers(0, 6))):
        parents.append(some_of(some.integers(0, number)))
        tokens.append(number)  # all differ, so that siblings do
    chances = [some_of(some.floats(0, 1)) for _ in tokens]
    return DraftTree(tuple(tokens), tuple(parents), tuple(chances))


def rate(drafts: list[DraftTree], kept: list[tuple[int, ...]], costs: list[float]) -> float:
    """Tokens per time if these nodes of each draft are verified."""
    gain = 0.0
    for draft, nodes in zip(drafts, kept, strict=True):
        for node in nodes:
            chance = 1.0
            for each in draft.ancestors(node)[1:]:
                chance *= draft.chances[each - 1]
            gain += chance
    count = len(drafts) + sum(map(len, kept))
    return (len(drafts) + gain) / costs[count - 1]


def closed(draft: DraftTree) -> list[tuple[int, ...]]:
    """Lists all parts of a draft that hold every node's parent."""
    nodes = range(1, len(draft) + 1)
    every = itertools.chain.from_iterable(itertools.combinations(nodes, size) for size in range(len(draft) + 1))
    return [part for part in every if all(draft.parents[n - 1] in (0, *part) for n in part)]


@settings(max_examples=80, deadline=None)
@given(
    some.lists(drafts_with_chances(), min_size=1, max_size=2), some.lists(some.floats(0, 0.6), min_size=13, max_size=13)
)
def test_no_other_part_of_the_drafts_gives_more_tokens_per_time(drafts: list[DraftTree], slopes: list[float]) -> None:
    costs = list(itertools.accumulate(slopes, initial=1.0))
    parts = within_budget(drafts, costs)
    kept = [tuple(token + 1 for token in part.tokens) for part in parts]  # token n - 1 is node n
    best = max(rate(drafts, list(choice), costs) for choice in itertools.product(*map(closed, drafts)))
    assert rate(drafts, kept, costs) == pytest.approx(best)


def test_a_step_has_no_more_tokens_than_costs_are_known_for() -> None:
    draft = DraftTree.chain(list(range(10)))
    assert sum(map(len, within_budget([draft, draft], [1.0] * 7))) == 5
    assert sum(map(len, within_budget([draft] * 9, [1.0] * 7))) == 0


def test_costs_lie_on_lines_and_mean_something() -> None:
    assert costs_by_tokens({1: 1.0, 2: 1.5, 6: 3.5}) == (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    large, wide, small = (
        costs_by_tokens(usual_costs(num, processor))
        for num, processor in ((10**8, "AVX2"), (10**8, "AVX512"), (10**6, "AVX2"))
    )
    assert len(large) == len(wide) == len(small) == 64 and large[15] > wide[15] > small[15]
    assert usual_costs(10**9, None)[64] < small[63] < large[63]
    assert usual_costs(10**9, "DEFAULT")[8] == large[7]
    with pytest.raises(ArgumentError, match="that of 1 token among them"):
        costs_by_tokens({})


def test_rates_follow_what_is_seen_and_go_back_when_nobody_looks() -> None:
    rates = Rates({1: 0.5})
    for _ in range(100):
        rates.see(1, False)
    low = rates[1]
    assert low < 0.03
    for _ in range(400):
        rates.rest()
    assert 0.45 < rates[1] < 0.5


def test_drafts_of_several_become_one_tree() -> None:
    tree = DraftTree.union([DraftTree.chain([7, 8], [0.5, 0.5]), DraftTree((7, 9), (0, 0), (0.8, 0.1))])
    assert (tree.tokens, tree.parents, tree.chances) == ((7, 8, 9), (0, 1, 0), (0.8, 0.5, 0.1))
    assert tree.along([7, 8, 9]) == [0, 1, 2] and tree.along([9]) == [0, 3]


def test_a_speculator_without_drafters_keeps_nothing() -> None:
    speculator = Speculator()
    speculator.join("row", DraftText([1], GREEDY))
    assert speculator.propose(["row"], [5]) == []
    speculator.leave("row")
