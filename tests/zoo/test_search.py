"""Searches written out: every step is legal, a dead end is one, the way back leads to the right state, answers hold."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.thinking.backtrack import Answers, as_dear, counts, vote
from partsong.errors import ArgumentError
from partsong.evals.reasoning.tasks.sudoku_solver import solve
from partsong_zoo.chat_model import CONTEXT, EOS, MODEL, PAD, USER
from partsong_zoo.search import TASKS, sudokus
from partsong_zoo.search.model import LANGUAGES, build_model, flops
from partsong_zoo.search.problems import SearchProblem
from partsong_zoo.search.training import Way, draw_batches, mean_loss
from partsong_zoo.sums import parse, support
from partsong_zoo.sums.sampling import Draft
from partsong_zoo.sums.solutions import searched
from partsong_zoo.training.common import World
from tests.recipe_module import loaded

STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)(!|, |: yes\. answer: )?")
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
WORD = re.compile(r"!|(-)?([a-f])([1-6])(\?)?([1-6])?")
ANSWER = ": yes. answer: "


def drawn(task: str, num: int) -> list[SearchProblem]:
    """Problems of training and fresh ones."""
    rng = random.Random(1)
    return [TASKS[task].draw(rng, fresh=False) for _ in range(num)] + TASKS[task].fresh(num, 5)


# --- countdowns -------------------------------------------------------------------------------------------------------


def follow_countdown(numbers: tuple[int, ...], target: int, text: str) -> tuple[int, int]:
    """Works through a search by a stack of what is left; the numbers of misses and of ways back."""
    stack, misses, backs, place = [(sorted(numbers), set[str]())], 0, 0, 0
    while True:
        if text[place] == "<":
            stack.pop()
            backs, place = backs + 1, place + 1
            continue
        found = STEP.match(text, place)
        assert found is not None, text[place:]
        left, tried = list(stack[-1][0]), stack[-1][1]
        first, second, value = int(found[1]), int(found[3]), int(found[4])
        assert found[0] not in tried
        tried.add(found[0])
        left.remove(first)
        left.remove(second)
        assert SIGNS[found[2]](first, second) == value
        place = found.end()
        if left:
            assert found[5] == ", "
            stack.append((sorted([*left, value]), set()))
            continue
        if value == target:
            assert found[5] == ANSWER
            return misses, backs
        assert found[5] == "!"
        misses += 1


@pytest.mark.parametrize("numbers", [(3, 7, 25), (2, 3, 5, 9)])
def test_a_countdown_is_searched_step_by_step(numbers: tuple[int, ...]) -> None:
    deepest = 0
    for target in range(1, 100):
        question = f"make {target} from {' '.join(map(str, numbers))}"
        try:
            text = searched(parse(question))
        except ArgumentError:
            continue
        assert support(question)  # found by another solver
        misses, backs = follow_countdown(numbers, target, text)
        assert TASKS["countdown"].is_right(question, text)
        deepest = max(deepest, min(misses, backs))
    assert deepest > 3
    with pytest.raises(ArgumentError, match="no solution of 'make 99 from 1 2'"):
        searched(parse("make 99 from 1 2"))


# --- sudokus ----------------------------------------------------------------------------------------------------------


def possible(cells: list[int], place: int) -> set[int]:
    """The digits that no cell of the same row, column or box has."""
    size = math.isqrt(len(cells))
    height, width, (row, column) = 2, size // 2, divmod(place, size)
    together = {
        said
        for (line, across), said in zip(((n // size, n % size) for n in range(size * size)), cells, strict=True)
        if line == row or across == column or (line // height, across // width) == (row // height, column // width)
    }
    return set(range(1, size + 1)) - together


def follow_sudoku(clues: list[int], text: str) -> int:
    """Works through a search by a stack of placements; the number of dead ends."""
    cells, stack, ends, words = list(clues), list[tuple[int, bool]](), 0, [*WORD.finditer(text)]
    assert "".join(word[0] for word in words) == text
    going_back, size = False, math.isqrt(len(clues))
    refused: dict[tuple[int, ...], set[int]] = {}
    for word in words:
        empty = [place for place, digit in enumerate(cells) if not digit]
        if word[0] == "!":
            assert not possible(cells, empty[0]) and not going_back
            ends, going_back = ends + 1, True
            continue
        back, row, column, mark, digit = word.groups()
        place = size * "abcdef".index(row) + int(column) - 1
        if back:
            assert going_back and not digit
            was, guessed = stack.pop()
            assert was == place
            said, cells[place] = cells[place], 0
            refused.setdefault((*cells, place), set()).add(said)
            going_back = not guessed
            continue
        left = possible(cells, place) - refused.get((*cells, place), set())
        assert not going_back and int(digit) in left and place == empty[0]
        assert bool(mark) == (len(left) > 1)
        cells[place] = int(digit)
        stack.append((place, bool(mark)))
    assert [tuple(cells)] == solve(clues, size)
    return ends


def square(text: str, size: int) -> list[int]:
    """The cells of a text in which nothing is emptied."""
    cells = [0] * size * size
    for row, column, digit in re.findall("([a-f])([1-6])([1-6])", text):
        cells[size * "abcdef".index(row) + int(column) - 1] = int(digit)
    return cells


@pytest.mark.parametrize("size", [4, 6])
def test_a_sudoku_is_searched_step_by_step(size: int) -> None:
    ends = 0
    for one in drawn(f"sudoku-{size}", 25):
        clues = square(one.question, size)
        ends += follow_sudoku(clues, one.search)
        (solution,) = solve(clues, size)
        assert square(one.question + one.direct, size) == list(solution)
        assert sudokus.written(square(one.direct, size)) == one.direct
    assert ends > 40


def test_answers_to_sudokus_are_judged() -> None:
    (one,), judge = TASKS["sudoku-4"].fresh(1, 2), TASKS["sudoku-4"].is_right
    words = re.findall(r"[a-f][1-6][1-6]", one.direct)
    assert judge(one.question, one.direct) and judge(one.question, one.search)
    other, cell = words[0][:2] + str(int(words[0][2]) % 4 + 1), words[0][:2]
    assert judge(one.question, "".join([other, "-", cell, *words]))
    for wrong in (
        *(
            words[1:],
            [other, *words[1:]],
            [*words, words[0]],
            [],
            [*words, one.question[:3]],
            [*words, "a"],
            [*words, "e11"],
        ),
        *([*words, "a"], [*words, "e11"], [other, *words], [*words, "-", cell], ["-", one.question[:2], *words]),
    ):
        assert not judge(one.question, "".join(wrong))


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_problems_follow_the_seed_and_fit(task: str) -> None:
    one, other = drawn(task, 8), drawn(task, 8)
    assert one == other and len({problem.question for problem in one}) == 16
    assert TASKS[task].fresh(3, 5) == TASKS[task].fresh(8, 5)[:3] != TASKS[task].fresh(3, 6)
    for problem in one:
        for text in (problem.direct, problem.search):
            ids = LANGUAGES[task].encode(text)
            assert LANGUAGES[task].decode(ids) == text and len(ids) < TASKS[task].most < CONTEXT - 60
            assert TASKS[task].is_right(problem.question, text)


def test_a_step_of_both_ways_has_as_many_tokens_and_learns_what_is_written() -> None:
    for way in ("direct", "search"):
        batches = draw_batches("countdown", random.Random(2), way, 900)
        assert 900 <= sum(int((batch.ids != PAD).sum()) for batch in batches) < 1300
        for batch in batches:
            for ids, learned in zip(batch.ids.tolist(), batch.learned.tolist(), strict=True):
                begin = ids.index(MODEL) + 1
                assert ids[0] == USER and learned == [begin <= place <= ids.index(EOS) for place in range(len(ids))]


@torch.no_grad()
def test_the_loss_is_the_mean_over_all_tokens() -> None:
    torch.manual_seed(0)
    model = build_model("countdown", 1, 1)
    whole, parts = (draw_batches("countdown", random.Random(2), "search", 500, parts=n) for n in (1, 3))
    assert len(whole) == 1 and len(parts) == 3
    assert float(mean_loss(model, parts)) == pytest.approx(float(mean_loss(model, whole)), rel=1e-5)


def test_operations_are_counted() -> None:
    """Against the counter of torch, for one pass over all tokens, all of which it gives logits."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model("countdown", 2, 3)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, 20, dtype=torch.long))
    masked = 4 * 3 * 64 * (20 * 20 - 20 * 21 // 2)  # it counts the half that the mask hides
    assert counter.get_total_flops() - masked == pytest.approx(flops(model, 1, 20), rel=0.01)


def test_chances_of_some_draws_and_votes() -> None:
    def draft(text: str) -> Draft:
        return Draft(ANSWER + text, True, 3, 4)

    texts = [draft("5*2+1"), draft("5+2*1"), draft("5+2*1"), draft("7")]
    one = Answers([texts[0]], [texts], [2], [True], 10.0, 7.0, 5.0)
    assert one.scores(0) == [1.0] and one.scores(1) == [0.5] and one.scores(4) == [1.0]
    assert one.scores(2) == [pytest.approx(1 - 1 / 6)]  # one of six pairs has no right one
    assert (one.tokens(0), one.tokens(3), one.flops(0), one.flops(3)) == (4.0, 12.0, 17.0, 25.0)
    assert vote("make 7 from 5 2 1", "countdown", texts) and not vote("make 7 from 5 2 1", "countdown", texts[:1])
    assert not vote("make 7 from 5 2 1", "countdown", [Draft("5", False, 3, 1)])
    long = Answers([Draft("", True, 3, 22)], [], [], [True], 10.0, 14.0, 5.0)
    assert as_dear(long, one, 9) == {"tokens": 5, "operations": 2} and as_dear(long, one, 4)["tokens"] == 4
    assert as_dear(one, one, 9) == {"tokens": 1, "operations": 1}
    assert counts(9) == [1, 2, 4, 8]


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe() -> Iterator[ModuleType]:
    with loaded("train_search") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **changed: Any) -> Any:
    """A miniature of the recipe."""
    sizes = {"steps": 20, "tokens": 400, "heads": 1, "depth": 1, "problems": 2, "save_minutes": 0.0}
    return recipe.Config(out=str(out), **{**sizes, **changed})


@pytest.mark.parametrize(("task", "way"), [("countdown", "direct"), ("sudoku-4", "search")])
def test_the_recipe_makes_a_stock_folder_and_scores(recipe: ModuleType, tmp_path: Path, task: str, way: Way) -> None:
    config = tiny(recipe, tmp_path, task=task, way=way)
    recipe.run(config, World("cpu"))
    folder = tmp_path / "export" / f"{task}-{way}"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and {p.dtype for p in model.parameters()} == {torch.float32}
    (one,) = TASKS[task].fresh(1, 9)
    assert AutoTokenizer.from_pretrained(folder)(one.search).input_ids == LANGUAGES[task].encode(one.search)
    scores = json.loads((tmp_path / f"scores-{task}-{way}.json").read_text())
    assert 0 <= scores["right"] <= scores["finished"] <= 1 and 0 < scores["tokens"] <= TASKS[task].most
    batches = draw_batches(task, random.Random(8), way, 800)
    with torch.no_grad():
        assert float(mean_loss(model, batches)) < 0.98 * float(mean_loss(recipe.new_model(config), batches))


def test_stages_out_of_turn_and_unknown_ones_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no stage 'learn'"):
        recipe.run(tiny(recipe, tmp_path, stages="learn"), World("cpu"))
    with pytest.raises(ArgumentError, match="run the stage 'train' first"):
        recipe.run(tiny(recipe, tmp_path, stages="export"), World("cpu"))
