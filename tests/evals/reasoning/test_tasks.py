"""Problems and their checks against brute force written here, which shares nothing with them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.evals.reasoning.tasks import TASKS
from partsong.evals.reasoning.tasks.countdown import reaches
from partsong.evals.reasoning.tasks.sudoku import is_solved
from partsong.evals.reasoning.tasks.sudoku_solver import solve

NAMES = list(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_gold_answers_are_found_and_right_and_others_are_not(name: str) -> None:
    drawn = TASKS[name](40, seed=5)
    for place, problem in enumerate(drawn):
        found = problem.extract(f"Let me see.\n\n{problem.gold}")
        assert found == problem.gold and problem.check(found)
        assert not problem.check(None) and not problem.check("") and not problem.check("9**9**9**9")
        other = drawn[place - 1]
        assert problem.check(other.gold) == (other.gold == problem.gold)
        assert problem.name == f"{name}/{place}"


@pytest.mark.parametrize("name", NAMES)
def test_problems_follow_the_seed_and_their_number(name: str) -> None:
    many, few, other = TASKS[name](20, seed=1), TASKS[name](5, seed=1), TASKS[name](20, seed=2)
    assert [problem.question for problem in few] == [problem.question for problem in many[:5]]
    assert len({problem.question for problem in (*many, *other)}) >= 38
    assert TASKS[name](0) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[
            ("countdown", {"count": 1}),
            ("countdown", {"target": 5}),
            ("sudoku", {"size": 5}),
            ("sudoku", {"holes": 17}),
        ],
        *[("word_problems", {"steps": 0}), ("multiplication", {"digits": True}), ("list_operations", {"length": 2})],
        *[(name, {"num": -1}) for name in NAMES],
    ],
)
def test_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(options))}="):
        TASKS[name](**{"num": 1, **options})


# --- countdown --------------------------------------------------------------------------------------------------------


def combinations(parts: tuple[tuple[str, Fraction], ...]) -> Iterator[tuple[str, Fraction]]:
    """Every expression from all parts, with its value."""
    if len(parts) == 1:
        yield parts[0]
        return
    for (i, (left, a)), (j, (right, b)) in itertools.permutations(enumerate(parts), 2):
        rest = tuple(part for k, part in enumerate(parts) if k not in (i, j))
        made = [(f"({left}+{right})", a + b), (f"({left}-{right})", a - b), (f"({left}*{right})", a * b)]
        made += [(f"({left}/{right})", a / b)] if b else []
        for one in made:
            yield from combinations((*rest, one))


def test_countdowns_can_be_solved_and_all_solutions_are_right() -> None:
    for problem in TASKS["countdown"](12, seed=9, count=3):
        numbers, target = problem.facts["numbers"], problem.facts["target"]
        right = wrong = 0
        for text, value in combinations(tuple((str(n), Fraction(n)) for n in numbers)):
            found = problem.extract(f"{text} = {target}")
            assert problem.check(found) == (value == target), text
            right, wrong = right + (value == target), wrong + (value != target)
        assert right > 0 and wrong > 0
        assert str(target) in problem.question and 1 <= target <= 100


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *[("3*(25-5)", True), ("(25-5)*3", True), ("60", False), ("3*25-5", False), ("3*(25-5)+0", False)],
        *[("3*(25-5)*1", False), ("3*(25-5+5-5)", False), ("-(5-25)*3", True), ("3**1*(25-5)", False), (None, False)],
        *[("75-25+5*2", False), ("(25-5)*(5-2)", False), ("3*25-5*3", False), ("9**9**9**9", False), ("60=60", False)],
    ],
)
def test_countdown_rules(answer: str | None, right: bool) -> None:
    assert reaches(answer, numbers=(3, 5, 25), target=60) is right


def test_some_numbers_may_be_left_where_that_is_asked() -> None:
    assert reaches("25*3", numbers=(3, 5, 25), target=75, use_all=False)
    assert not reaches("25*3", numbers=(3, 5, 25), target=75)
    assert not reaches("5*5*3", numbers=(3, 5, 25), target=75, use_all=False)


# --- sudoku -----------------------------------------------------------------------------------------------------------


def plain_solutions(clues: tuple[int, ...], size: int, boxes: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Cell by cell in order, checking rows, columns and boxes by looking."""
    if 0 not in clues:
        yield clues
        return
    place = clues.index(0)
    row, column = divmod(place, size)
    top, left = row - row % boxes[0], column - column % boxes[1]
    seen = {clues[row * size + c] for c in range(size)} | {clues[r * size + column] for r in range(size)}
    seen |= {clues[(top + r) * size + left + c] for r in range(boxes[0]) for c in range(boxes[1])}
    for digit in range(1, size + 1):
        if digit not in seen:
            yield from plain_solutions((*clues[:place], digit, *clues[place + 1 :]), size, boxes)


@pytest.mark.parametrize(("size", "boxes", "num"), [(4, (2, 2), 25), (6, (2, 3), 8), (9, (3, 3), 2)])
def test_sudokus_have_one_solution(size: int, boxes: tuple[int, int], num: int) -> None:
    for problem in TASKS["sudoku"](num, seed=4, size=size):
        found = list(itertools.islice(plain_solutions(problem.facts["clues"], size, boxes), 2))
        assert ["".join(map(str, grid)) for grid in found] == [problem.gold.replace("\n", "")]
        assert problem.facts["clues"].count(0) >= size


def test_every_four_by_four_square_and_nothing_else_is_solved() -> None:
    squares = set(solve([0] * 16, 4, most=1000))
    assert len(squares) == 288 and squares == set(plain_solutions((0,) * 16, 4, (2, 2)))
    draw = random.Random(0)
    for _ in range(300):
        cells = list(draw.choice(sorted(squares)))
        for _ in range(draw.randint(0, 2)):
            i, j = draw.randrange(16), draw.randrange(16)
            cells[i], cells[j] = cells[j], cells[i]
        text = "\n".join("".join(map(str, cells[low : low + 4])) for low in range(0, 16, 4))
        clues = tuple(cell if draw.random() < 0.3 else 0 for cell in cells)
        assert is_solved(text, clues=clues, size=4) == (tuple(cells) in squares)
    assert not is_solved("1234\n3412\n2143\n4321", clues=(2,) + 15 * (0,), size=4)
    assert not is_solved("1234\n3412\n2143", clues=16 * (0,), size=4)
    assert solve([1, 1, *14 * [0]], 4) == []


# --- the others -------------------------------------------------------------------------------------------------------


def test_products() -> None:
    for problem in TASKS["multiplication"](30, seed=2, digits=4, other_digits=2):
        left, right = map(int, re.findall(r"\d+", problem.question))
        assert (len(str(left)), len(str(right))) == (4, 2)
        assert int(problem.gold) == sum(left for _ in range(right))
        assert problem.check(problem.extract(f"that is {int(problem.gold):,}."))


def test_stories_worked_out_again() -> None:
    """What the sentences say, read with patterns of our own, gives the gold number."""
    patterns = [
        (r"finds (\d+) more|gives \w+ another (\d+)", lambda have, k: have + k[0]),
        (r"gives (\d+) of|loses (\d+)", lambda have, k: have - k[0]),
        (r"has by (\d+)|ends up with (\d+) times", lambda have, k: have * k[0]),
        (r"among (\d+) people|into (\d+) equal", lambda have, k: have // k[0]),
        (r"buys (\d+) packs of (\d+)|^ ?(\d+) children bring \w+ (\d+)", lambda have, k: have + k[0] * k[1]),
    ]
    for problem in TASKS["word_problems"](150, seed=8, steps=4):
        first, *sentences = re.split(r"(?<=\.)\s", problem.question.partition(" How many")[0])
        have = int(re.findall(r"\d+", first)[0])
        for sentence in sentences:
            matches = [(rule, re.search(pattern, sentence)) for pattern, rule in patterns]
            ((rule, match),) = [(rule, match) for rule, match in matches if match is not None]
            have = rule(have, [int(number) for number in match.groups() if number])
        assert str(have) == problem.gold and 1 <= have <= 10_000


def test_lists_worked_out_again() -> None:
    """By the words of the question, item by item."""

    def done(words: str, items: list[int]) -> list[int]:
        number = int(found[0]) if (found := re.findall(r"\d+", words)) else 0
        if "ascending" in words:
            return [item for value in range(2000) for item in items if item == value]
        if "reverse" in words:
            return list(reversed(items))
        if "add" in words:
            return [number + item for item in items]
        if "double" in words:
            return [item + item for item in items]
        if "to the end" in words:
            for _ in range(number):
                items = [*items[1:], items[0]]
            return items
        if "swap" in words:
            return [items[-1], *items[1 : len(items) - 1], items[0]]
        if "sum of all" in words:
            return list(itertools.accumulate(items))
        assert "even" in words
        return sorted(items, key=lambda item: 1 - item % 2)

    for problem in TASKS["list_operations"](150, seed=3, steps=3, length=5):
        start, _, rest = problem.question.partition("]. ")
        items = [int(item) for item in re.findall(r"\d+", start)]
        steps = re.split(r"(?:First, |Then )", rest.partition(" End with")[0])[1:]
        assert len(steps) == 3
        for words in steps:
            items = done(words, items)
        assert problem.gold == str(items)
