"""The list tasks: what is drawn, which answers are valid, and that checking agrees with listing."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import ArgumentError, ArgumentTypeError, PartsongError
from partsong_zoo import lists
from partsong_zoo.lists import FAMILIES, check, draw, examples, parse, sizes, support
from partsong_zoo.lists.requests import ANIMALS, WORDS, squares
from partsong_zoo.lists.tasks import _answer

RANDOM = ("shuffle", "insert_random", "remove_random", "replace_random", "latin")
cases = st.tuples(st.sampled_from(FAMILIES), st.integers(0, 2**32))


def drawn(case: tuple[str, int]) -> lists.Example:
    family, seed = case
    rng = random.Random(seed)
    # All 40320 shuffles of eight would only cost time.
    return draw(family, rng, rng.randint(3, 6) if family == "shuffle" else None)


@given(cases)
@settings(max_examples=200, deadline=None)
def test_an_example_is_its_own_valid_answer(case: tuple[str, int]) -> None:
    example = drawn(case)
    assert example.family == case[0] == parse(example.prompt).family
    assert check(example.prompt, example.answer)
    assert check(f"  {example.prompt} ", example.answer.replace(" ", "   "))
    assert set(f"{example.prompt} {example.answer}".split()) <= set(WORDS)
    assert example == drawn(case)


@given(cases)
@settings(max_examples=80, deadline=None)
def test_checking_accepts_just_what_is_listed(case: tuple[str, int]) -> None:
    example = drawn(case)
    listed = support(example.prompt)
    assert len(set(listed)) == len(listed)
    assert example.answer in listed
    assert all(check(example.prompt, answer) for answer in listed)
    assert len(listed) > 1 if example.family in RANDOM else len(listed) == 1


@given(cases, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_corrupted_answers_are_valid_only_if_listed(case: tuple[str, int], rng: random.Random) -> None:
    example = drawn(case)
    words, place = example.answer.split(), rng.randrange(len(example.answer.split()))
    other = rng.choice(WORDS)
    corrupted = rng.choice(
        [
            [*words[:place], other, *words[place + 1 :]],
            [*words[:place], other, *words[place:]],
            [*words[:place], *words[place + 1 :]],
            [*words, words[place]],
            [],
            rng.sample(words, len(words)),
        ]
    )
    text = " ".join(corrupted)
    assert check(example.prompt, text) == (text in support(example.prompt))


@pytest.mark.parametrize(
    ("prompt", "right", "wrong"),
    [
        ("copy : dog ant cat =", "dog ant cat", "dog cat ant"),
        ("reverse : dog ant cat =", "cat ant dog", "dog ant cat"),
        ("sort : dog zebu ant cat =", "ant cat dog zebu", "ant dog cat zebu"),
        ("shuffle : dog ant cat =", "cat dog ant", "cat dog dog"),
        ("insert at 1 with eel : dog ant cat =", "eel dog ant cat", "dog eel ant cat"),
        ("insert at 4 with eel : dog ant cat =", "dog ant cat eel", "dog ant eel cat"),
        ("insert at any with eel : dog ant cat =", "dog ant eel cat", "ant dog eel cat"),
        ("remove at 3 : dog ant cat =", "dog ant", "dog cat"),
        ("remove at any : dog ant cat =", "ant cat", "cat ant"),
        ("replace at 2 with eel : dog ant cat =", "dog eel cat", "eel ant cat"),
        ("replace at any with eel : dog ant cat =", "dog ant eel", "dog eel eel"),
        ("add : 9 9 9 + 1 2 =", "1 0 1 1", "1 0 1 0"),
        ("chain : 4 0 + 7 0 + 1 5 =", "1 1 0 , 1 2 5", "1 1 0 , 1 1 5"),
    ],
)
def test_what_the_tasks_mean(prompt: str, right: str, wrong: str) -> None:
    assert check(prompt, right)
    assert not check(prompt, wrong)


def test_a_latin_square_has_every_symbol_once_in_every_line() -> None:
    prompt = "latin : ant bat cat dog ="
    rows = ["ant bat cat dog", "bat ant dog cat", "cat dog ant bat", "dog cat bat ant"]
    assert check(prompt, " ".join(rows))
    assert not check(prompt, " ".join([rows[1], rows[0], rows[2], rows[2]]))
    assert not check(prompt, " ".join([*rows[:3], "dog cat ant bat"]))
    assert len(support(prompt)) == 576
    # 3 x 3: brute force over all fillings.
    whole = [
        grid
        for grid in itertools.product(range(3), repeat=9)
        if all(len(set(grid[3 * i : 3 * i + 3])) == len(set(grid[i::3])) == 3 for i in range(3))
    ]
    assert sorted(squares(3)) == whole


@pytest.mark.parametrize("size", range(3, 9))
def test_random_tasks_have_as_many_answers_as_they_should(size: int) -> None:
    wanted = {"insert_random": size + 1, "remove_random": size, "replace_random": size}
    for family, count in wanted.items():
        assert len(support(draw(family, random.Random(size), size).prompt)) == count
    if size <= 6:
        assert len(support(draw("shuffle", random.Random(size), size).prompt)) == math.factorial(size)


@pytest.mark.parametrize("family", RANDOM)
def test_answers_are_drawn_evenly(family: str) -> None:
    rng, num = random.Random(7), 4000
    prompt = draw(family, random.Random(3), 4).prompt
    request, truth = parse(prompt), support(prompt)
    seen = Counter(_answer(request, rng) for _ in range(num))
    assert set(seen) <= set(truth)
    # Chi-square of an even draw has mean k and deviation sqrt(2 k); the seed is fixed, so this does not flicker.
    expected, freedom = num / len(truth), len(truth) - 1
    chi = sum((seen[text] - expected) ** 2 / expected for text in truth)
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_examples_follow_the_seed_and_nothing_else() -> None:
    first = examples(40, seed=5)
    assert first == examples(80, seed=5)[:40]
    assert first != examples(40, seed=6)
    assert Counter(example.family for example in first) == Counter(FAMILIES[i % len(FAMILIES)] for i in range(40))
    assert {example.family for example in examples(4, families=["sort"])} == {"sort"}


def test_every_size_is_drawn_and_none_other() -> None:
    for family in FAMILIES:
        found = set()
        for seed in range(200):
            request = parse(draw(family, random.Random(seed)).prompt)
            longest = max((len(str(number)) for number in request.numbers), default=0)
            found.add(longest if family == "add" else len(request.items) or len(request.numbers))
        assert found == set(sizes(family)), family
    assert len(parse(draw("sort", random.Random(0), 8).prompt).items) == 8


def test_items_differ_and_are_in_alphabetical_order_in_the_vocabulary() -> None:
    assert list(ANIMALS) == sorted(set(ANIMALS))
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("sort dog ant =", "grammar"),
        ("sort : dog ant", "grammar"),
        ("order : dog ant =", "grammar"),
        ("sort at 2 : dog ant =", "grammar"),
        ("insert at 2 : dog ant =", "grammar"),
        ("sort : dog ant wombat =", "wombat"),
        ("sort : dog ant dog =", "twice"),
        ("insert at 1 with dog : dog ant =", "twice"),
        ("remove at 4 : dog ant cat =", "the last one is 3"),
        ("insert at 5 with eel : dog ant cat =", "the last one is 4"),
        ("latin : dog ant cat =", "4 symbols"),
        (f"copy : {' '.join(ANIMALS[:9])} =", "at most 8"),
        ("add : 12 + 3 =", "numbers"),
        ("add : 0 1 + 3 =", "numbers"),
        ("add : 1 + 2 + 3 =", "use chain"),
        ("", "grammar"),
    ],
)
def test_prompts_outside_the_language_are_refused(prompt: str, complaint: str) -> None:
    for call in (lambda: support(prompt), lambda: check(prompt, "ant")):
        with pytest.raises(ArgumentError, match=complaint):
            call()


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="text"):
        parse(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="known: copy"):
        draw("permute", random.Random(0))
    with pytest.raises(ArgumentError, match="sizes 3 to 8, not 9"):
        draw("copy", random.Random(0), 9)
    with pytest.raises(PartsongError, match="at least one task"):
        examples(3, families=[])


def test_the_task_loads_no_torch() -> None:
    code = "import sys, partsong_zoo.lists; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
