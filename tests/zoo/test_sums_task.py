"""Sums and countdowns: what is drawn is right by an evaluator of its own, and training shows nothing that is kept."""

from __future__ import annotations

import ast
import itertools
import operator
import random
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import ArgumentError, ArgumentTypeError, PartsongError
from partsong_zoo import sums
from partsong_zoo.sums import answer_of, check, draw, examples, held_out, parse, solve, support
from partsong_zoo.sums.prompts import PDR, REFINEMENT, RSA, again, again_from, distil, tally
from partsong_zoo.sums.solutions import LARGE, SIZES, attempt, near_miss

SIGNS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
cases = st.tuples(st.sampled_from(sums.FAMILIES), st.integers(0, 2**32), st.booleans())


def evaluated(text: str) -> int:
    """The value of an expression by Python's own grammar."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            assert type(node.value) is int
            return node.value
        assert isinstance(node, ast.BinOp)
        return SIGNS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)


def steps_of(text: str) -> list[tuple[int, str, int, int]]:
    listed = re.split(r": (?:yes|no)\. |\. answer", text)[0]
    found = [STEP.fullmatch(step) for step in listed.split(", ")]
    assert all(found), text
    return [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in found if m]


def follow(pool: list[int], text: str) -> int:
    """Works through a countdown's steps, each number used once; what is left at the end."""
    for first, sign, second, value in steps_of(text):
        assert evaluated(f"{first}{sign}{second}") == value
        pool.remove(first)
        pool.remove(second)
        pool.append(value)
    assert len(pool) == 1
    return pool[0]


@given(cases)
@settings(max_examples=200, deadline=None)
def test_a_solution_is_right_step_by_step(case: tuple[Any, int, bool]) -> None:
    family, seed, fresh = case
    example = draw(family, random.Random(seed), fresh=fresh)
    assert example == draw(family, random.Random(seed), fresh=fresh)
    problem = parse(example.question)
    assert (problem.family, held_out(problem)) == (family, fresh)
    assert check(example.question, example.solution)
    said = example.solution.rpartition("answer: ")[2]
    if family == "sum":
        assert evaluated(example.question.removesuffix("=?")) == problem.target == int(said)
        for first, sign, second, value in steps_of(example.solution):
            assert evaluated(f"{first}{sign}{second}") == value >= 0
        assert steps_of(example.solution)[-1][3] == problem.target
    else:
        assert follow(list(problem.numbers), example.solution) == problem.target == evaluated(said)
        assert sorted(map(int, re.findall(r"\d+", said))) == sorted(problem.numbers)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_work_that_leads_nowhere_is_right_work_and_says_so(seed: int) -> None:
    rng = random.Random(seed)
    example = draw("countdown", rng, fresh=False)
    question, missed = near_miss(example, rng)
    assert not held_out(parse(question))
    for asked, text in ((question, missed), (example.question, attempt(parse(example.question), rng))):
        problem = parse(asked)
        reached = follow(list(problem.numbers), text) == problem.target
        assert (": yes. answer: " in text, check(asked, text)) == (reached, reached)
        assert text.endswith(": no. answer: none") != reached
        assert (answer_of(text) is not None) == reached


def shapes(numbers: tuple[int, ...]) -> set[int]:
    """All values of expressions over the numbers in this order, every way of putting brackets."""
    if len(numbers) == 1:
        return set(numbers)
    found: set[int] = set()
    for cut in range(1, len(numbers)):
        for a, b in itertools.product(shapes(numbers[:cut]), shapes(numbers[cut:])):
            found |= {a + b, a - b, a * b}
    return found


def test_every_answer_of_a_countdown_is_found() -> None:
    rng = random.Random(5)
    for _ in range(12):
        numbers = tuple(rng.sample(range(2, 26), 3))
        reachable = set().union(*(shapes(order) for order in itertools.permutations(numbers)))
        for target in range(1, 120):
            question = f"make {target} from {' '.join(map(str, numbers))}"
            answers = support(question)
            assert bool(answers) == (target in reachable), question
            assert len(set(answers)) == len(answers)
            for answer in answers:
                assert check(question, answer)
                assert answer == answer_of(f"answer: {answer}")


def test_solutions_are_among_the_answers_and_come_in_many_orders() -> None:
    for example in examples(30, seed=2):
        assert answer_of(example.solution) in support(example.question)
    problem, rng = parse("31-17+9*11+8*19=?"), random.Random(0)
    assert len({solve(problem, rng) for _ in range(60)}) >= 10


@pytest.mark.parametrize(
    ("question", "right", "wrong"),
    [
        ("37+48-19*3=?", "28", "29"),
        ("37 + 48 - 19 * 3 = ?", "answer: 28", "answer: none"),
        ("37+48-19*3", "28", "37+48-19*3"),
        ("make 13 from 3 7 2 1", "1*(7+3*2)", "7+3*2"),
        ("MAKE 13  from 3 7 2 1", "Answer: 2*3+7*1", "26/2*(3+7-9)"),
        ("make 13 from 3 7 2 1", "3*2+7*1", "3*2+7*1*1"),
        ("make 13 from 3 7 2 1", "3*2+7*1", "9**9**9"),
        ("make 2 from 8 4", "", "8/4"),
        ("make 4 from 8 4", "8-4", "*".join(["9999"] * 300)),
        ("3+4=?", "7", "-" + "9" * 1900),
        ("3-4=?", "-1", "1"),
        ("make 4 from 8 4", "8-4", "__import__('os')"),
    ],
)
def test_what_the_questions_mean(question: str, right: str, wrong: str) -> None:
    assert check(question, right) == bool(right)
    assert not check(question, wrong)


@pytest.mark.parametrize(
    "question", ["", "37+48", "3", "make 8 from 4 4"], ids=["empty", "sum", "a number", "equal numbers"]
)
def test_short_questions(question: str) -> None:
    if question:
        assert support(question)
    else:
        with pytest.raises(ArgumentError, match="make 64 from"):
            parse(question)


@pytest.mark.parametrize(
    "question", ["2+2/1=?", "-3+4=?", "make from 3 4", "make 5 from 2", "make 5 from 1 1 1 1 1", "3**2=?", "1000+1=?"]
)
def test_other_questions_are_refused(question: str) -> None:
    for call in (parse, support):
        with pytest.raises(ArgumentError, match="cannot read"):
            call(question)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="text"):
        parse(7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="there are sum, countdown"):
        draw("product", random.Random(0), fresh=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PartsongError, match="at least one family"):
        examples(3, families=[])
    with pytest.raises(ArgumentError, match="5 attempts are given with the question; the model reads 1 to 4"):
        again("3+4=?", ["x"] * 5)
    with pytest.raises(ArgumentError, match="1 to 8"):
        distil("3+4=?", [])


def test_every_size_is_drawn_and_none_other() -> None:
    for family, wanted in SIZES.items():
        found = Counter(size_of(example.question) for example in examples(200, 1, [family]))  # pyright: ignore[reportArgumentType]
        assert set(found) == set(wanted)
        large = {size_of(draw(family, random.Random(s), fresh=False, sizes=LARGE[family]).question) for s in range(40)}  # pyright: ignore[reportArgumentType]
        assert large == set(LARGE[family])
    with pytest.raises(ArgumentError, match="a countdown has sizes 3, 4, not 5"):
        draw("countdown", random.Random(0), fresh=True, sizes=(3, 5))


def size_of(question: str) -> int:
    problem = parse(question)
    return len(problem.terms) or len(problem.numbers)


def test_examples_follow_the_seed_and_are_kept_from_training() -> None:
    first = examples(40, seed=5)
    assert first == examples(80, seed=5)[:40]
    assert first != examples(40, seed=6)
    assert Counter(example.family for example in first) == {"sum": 20, "countdown": 20}
    assert all(held_out(parse(example.question)) for example in first)


def test_one_problem_in_sixteen_is_kept_whatever_the_order_it_is_written_in() -> None:
    rng = random.Random(3)
    kept = 0
    for _ in range(1600):
        numbers, target = rng.sample(range(2, 26), 4), rng.randrange(10, 200)
        one, other = (
            held_out(parse(f"make {target} from {' '.join(map(str, order))}"))
            for order in (numbers, rng.sample(numbers, 4))
        )
        assert one == other
        kept += one
    assert 60 <= kept <= 145  # 100 expected, deviation 9.7
    assert held_out(parse("12+3*4-5=?")) == held_out(parse("4*3-5+12=?"))


def test_the_prompts_have_the_gaps_the_strategies_fill() -> None:
    for prompts in (PDR, REFINEMENT, RSA):
        prompts.validate()
    attempts = ["19*3=57, 85-57=28. answer: 28", "19*3=57, 85-57=38. answer: 38", "answer: none", "85-"]
    below = "".join(PDR.attempt.format(number=n, text=text) for n, text in enumerate(attempts, start=1))
    assert again("85-19*3=?", attempts) == PDR.again.format(question="85-19*3=?", workspace=below)
    assert distil("85-19*3=?", attempts) == PDR.distil.format(question="85-19*3=?", attempts=below)
    assert again("85-19*3=?", attempts) == RSA.combine.format(question="85-19*3=?", candidates=below)
    one = REFINEMENT.again.format(question="85-19*3=?", draft=attempts[0])
    assert one == again("85-19*3=?", attempts[:1])
    assert tally("85-19*3=?", attempts) == "found: 28, 38"
    assert again_from("85-19*3=?", tally("85-19*3=?", attempts)) == "85-19*3=?\nfound: 28, 38"


def test_the_task_loads_no_torch() -> None:
    code = "import sys, partsong_zoo.sums.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
