"""Products and countdowns in threads: the work is right, no thread needs another, and all formats say the same."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.reasoning.calls.text_tree import Fork, Part, Piece, flat_text
from partsong.reasoning.threads import FORMATS
from partsong.reasoning.threads.parse import parse as parse_text
from partsong_zoo.products import (
    ProductProblem,
    answer_of,
    check,
    draw,
    examples,
    held_out,
    in_sequence,
    in_threads,
    parse,
    work_out,
)
from partsong_zoo.products.model import VOCABULARY, build_tokenizer, encode
from partsong_zoo.products.problems import SIZES
from partsong_zoo.products.training import as_json, draw_problems, speech_of, text_of
from partsong_zoo.sums import support
from partsong_zoo.training.thread_batch import pack_threads

SEEDS = range(40)


def some(family: Any, seed: int) -> ProductProblem:
    return draw(family, random.Random(seed), fresh=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_work_of_a_product_is_right_to_the_last_digit(seed: int) -> None:
    problem = some("product", seed)
    first, second = problem.numbers
    work = work_out(problem)
    left, right = work.begin.split("*")
    assert (int(left[::-1]), int(right[::-1])) == (first, second)
    partial = []
    for place, (thread, digit) in enumerate(zip(work.threads, right, strict=True)):
        assert thread.goal == digit and thread.task == f"{left}*{'0' * place}{digit}"
        head, steps = thread.steps.split("*")
        values = [(int(a), int(b)) for a, b in (step.split("=") for step in steps.split(","))]
        assert head == digit and [a for a, _ in values] == [int(one) for one in left]
        # Each value is a digit by the factor and what the value before it carries.
        carried = [0, *(value // 10 for _, value in values)]
        assert all(value == a * int(digit) + c for (a, value), c in zip(values, carried, strict=False))
        partial.append(int(thread.result[::-1]))
        assert partial[-1] == first * int(digit) * 10**place
    assert sum(partial) == first * second == problem.target == int(work.answer)
    columns = [int(column) for column in work.together.split(",")]
    assert int("".join(str(value % 10) for value in reversed(columns))) == problem.target


@pytest.mark.parametrize("seed", SEEDS)
def test_the_work_of_a_countdown_finds_all_there_is(seed: int) -> None:
    problem = some("countdown", seed)
    work = work_out(problem)
    pairs = list(itertools.combinations(problem.numbers, 2))
    assert [thread.goal for thread in work.threads] == [f"{a} {b}" for a, b in pairs]
    for thread in work.threads:
        assert thread.result == "none" or check(problem.question, thread.result)
        for made, value in re.findall(r"(\d+[-+*]\d+)=(\d+)", thread.steps):
            a, sign, b = re.split(r"([-+*])", made)
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(value)
    hits = {str(number) for number, thread in enumerate(work.threads, 1) if thread.result != "none"}
    assert bool(hits) == bool(support(problem.question))
    assert set(work.together.split(",")) == hits and check(problem.question, work.answer)


def texts(parts: Sequence[Part], kind: type) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Fork):
            for thread in part.threads:
                yield from texts(thread, kind)
        elif isinstance(part, kind):
            yield part if isinstance(part, str) else part.text  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["product", "countdown"])
def test_a_format_says_the_work_in_its_own_tags(name: str, family: str) -> None:
    form, problem = FORMATS[name], some(family, 3)
    work, parts = work_out(problem), in_threads(work_out(problem), FORMATS[name])
    (fork,) = (part for part in parts if isinstance(part, Fork))
    assert len(fork.threads) == len(work.threads) and fork.apart == form.apart
    assert fork.marks == (tuple(range(1, len(work.threads) + 1)) if form.marks else ())
    for number, (thread, said) in enumerate(zip(fork.threads, work.threads, strict=True), 1):
        assert thread[0] == (said.task if form.apart else form.opener(number))
        assert said.steps in flat_text(thread) and said.result in flat_text(thread)
        # The tag that ends a thread stops it: a piece of its own.
        assert thread[-1] == Piece(form.closer(number))
    if form.announce:
        assert Piece(form.announce) in parts
    # All that is given to the model are tags, and what children return.
    given = set(texts(parts, str)) - {thread.task for thread in work.threads}
    results = "|".join(re.escape(thread.result) for thread in work.threads)
    assert all(re.fullmatch(rf"(\s|<\/?\w+>|\d:|{results})*", text) for text in given)
    assert answer_of(flat_text(parts)) == answer_of(f"answer: {work.answer}")
    assert not parse_text(flat_text(parts), form).notes or form.apart


@pytest.mark.parametrize("family", ["product", "countdown"])
def test_the_sequential_twin_says_the_same(family: str) -> None:
    work = work_out(some(family, 5))
    (piece,) = in_sequence(work)
    assert isinstance(piece, Piece)
    places = [piece.text.index(thread.text) for thread in work.threads]
    assert places == sorted(places) and piece.text.startswith(work.begin)
    assert piece.text.endswith(f".{work.together}.answer: {work.answer}")


@pytest.mark.parametrize("family", ["product", "countdown"])
def test_training_never_shows_what_measures(family: Any) -> None:
    fresh = examples(200, 1, family)
    assert all(held_out(problem) for problem in fresh)
    assert len({problem.question for problem in fresh}) == 200
    assert fresh[:50] == examples(50, 1, family)
    rng = random.Random(0)
    shown = [problem for _ in range(10) for problem in draw_problems(rng, 20, family)]
    assert not any(held_out(problem) for problem in shown)
    if family == "product":
        sizes = {tuple(len(str(number)) for number in problem.numbers) for problem in fresh}
        assert sizes == set(SIZES)
        assert held_out(parse("12*345=?")) == held_out(parse("345*12=?"))


def test_the_problems_of_a_step_have_one_size() -> None:
    for seed in range(10):
        problems = draw_problems(random.Random(seed), 8)
        assert len({tuple(len(str(number)) for number in problem.numbers) for problem in problems}) == 1


@pytest.mark.full
def test_problems_run_out() -> None:
    with pytest.raises(ArgumentError, match="50 fresh problems of the sizes"):
        examples(50, 0, sizes=[(1, 1)])


@pytest.mark.parametrize(
    "question", ["12*", "0*3=?", "12+3=?", "make 3 from 1 2", "make 3 from 1 2 3 4", "1*1234567890"]
)
def test_other_questions_are_refused(question: str) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        parse(question)


def test_a_question_is_text() -> None:
    with pytest.raises(ArgumentTypeError, match="a question is text, found 12"):
        parse(12)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["1", "answer: 408 ", "x. ANSWER: 408", "407", "4 08", "", "answer: __import__('os')"])
def test_only_the_product_is_an_answer(said: str) -> None:
    assert check("12*34=?", said) == ("408" in said)


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMATS, None])
def test_all_texts_are_of_the_language(name: str | None) -> None:
    form = None if name is None else FORMATS[name]
    tokenizer, rng = build_tokenizer(), random.Random(0)
    speech = speech_of(tokenizer)
    for family in ("product", "countdown"):
        problem = draw(family, rng, fresh=False)  # type: ignore[arg-type]
        work = work_out(problem)
        text = flat_text(in_sequence(work) if form is None else in_threads(work, form))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == encode(text) and VOCABULARY["<unk>"] not in ids
        # White space between tags means nothing; all else comes back.
        assert re.sub(r"\s", "", str(tokenizer.decode(ids))) == re.sub(r"\s", "", text)
        assert list(speech.prompt(problem.question))[1:-1] == encode(problem.question)
        for joined in (True, False):
            batch = pack_threads([text_of(problem, form, speech, joined=joined)])
            learned = batch.ids[batch.learn].tolist()
            assert speech.end in learned and VOCABULARY["<unk>"] not in batch.ids


def test_tags_are_one_token_each() -> None:
    for form in FORMATS.values():
        for tag in re.findall(r"<[^>]*>", form.opener(3) + form.closer(3) + form.join + form.announce + form.begin):
            assert len(encode(tag)) == 1, tag


def test_parts_can_be_written_to_a_file() -> None:
    parts = (Piece("a"), Fork((("b", Piece("c")),), (1,)), "d")
    threads = {"threads": [["b", {"written": "c"}]], "marks": [1], "apart": False}
    assert as_json(parts) == [{"written": "a"}, threads, "d"]
