"""Pools on disk, strategies that run on them unchanged, and their vectorised twins."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partsong.errors import ArgumentError
from partsong.evals.reasoning.pool import Pool, collect, run_seed
from partsong.evals.reasoning.pool_engine import PoolEngine
from partsong.evals.reasoning.pool_suite import DEFAULT_STRATEGIES, parse_rescorer, pool_suite
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.rescore import pass_at
from partsong.evals.reasoning.score_table import score_table
from partsong.evals.reasoning.suite import read_strategies
from partsong.reasoning import Answer, Completion, Message, Parameters, Run, Usage
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.calls.virtual_time import run_virtual
from tests.evals.reasoning.pools import DRAWN, engine, problems

NUM = 24


@functools.cache
def pool_of(num: int = 12) -> tuple[Pool, list[Problem]]:
    chosen = problems(num)
    pool = Pool(engine="scripted", parameters=DRAWN)
    for problem in chosen:
        run = Run(engine(), seed=run_seed(0, problem))
        pool.questions[problem.name] = problem.question
        pool.samples[problem.name] = {
            number: run_virtual(
                run.call([Message("user", (problem.question,))], path=("sample",), sample=number, parameters=DRAWN)
            )[0]
            for number in range(NUM)
        }
    return pool, chosen


def on_pool(text: str, pool: Pool, problem: Problem) -> Answer:
    (strategy,) = read_strategies([text]).values()
    run = Run(PoolEngine(pool, problem, chunk=1), seed=5)
    parameters = pool.parameters
    return run_virtual(strategy(run, problem.question, extract=problem.extract, parameters=parameters))[0]


# --- twins ------------------------------------------------------------------------------------------------------------

TWINS = [
    ("single", "single"),
    *[(text, text) for n in (1, 2, 5, NUM) for text in [f"self-consistency:num={n}"]],
    ("self-consistency:num=9,early_stop=false", "self-consistency:num=9,early_stop=false"),
    *[(text, text) for n in (3, NUM) for text in [f"adaptive-consistency:num={n}"]],
    ("adaptive-consistency:num=20,confidence=0.8", "adaptive-consistency:num=20,confidence=0.8"),
    *[(text, text) for n in (1, 8, NUM) for text in [f"best-of-n:num={n}"]],
    *[(text, text) for text in ("best-of-n:num=8,selection=borda", "best-of-n:num=24,selection=borda,power=2.0")],
    *[(text, text) for m in (1, 3, 8) for text in [f"short-m:num=8,shortest={m}"]],
    ("short-m:num=24,shortest=20", "short-m:num=24,shortest=20"),
    ("short-m:num=24,shortest=5,early_stop=false", "short-m:num=24,shortest=5,early_stop=false"),
    ("deepconf-offline:num=24,top=0.3", "deepconf:num=24,top=0.3,online=false,score=mean"),
    ("deepconf-offline:num=16,top=0.9", "deepconf:num=16,top=0.9,online=false,score=mean"),
]


@pytest.mark.parametrize(("twin", "text"), TWINS, ids=[twin for twin, _ in TWINS])
def test_a_twin_gives_what_the_strategy_gives_on_the_pool(twin: str, text: str) -> None:
    pool, chosen = pool_of()
    table = score_table(pool, chosen, NUM)
    found = parse_rescorer(twin)(table)
    for row, problem in enumerate(chosen):
        live = on_pool(text, pool, problem)
        vote = None if found.vote[row] < 0 else table.answers[row][found.vote[row]]
        assert vote == live.answer, problem.name
        assert bool(found.right[row]) == problem.check(live.answer)
        cancelled = sum(table.tokens[row] > found.critical[row])
        # A sample that is cancelled in the very moment at which it writes a token has written it or not.
        assert abs(int(found.total[row]) - live.summary["tokens_total"]) <= cancelled
        # short-m halts the samples that are still written, at their next token: the run counts that one too.
        slack = int(text.startswith("short-m"))
        assert 0 <= live.summary["tokens_critical"] - int(found.critical[row]) <= slack


def test_strategies_on_a_pool_are_live_ones() -> None:
    """The same seeds give the same samples: what runs on the pool ran on the engine."""
    pool, chosen = pool_of()
    (strategy,) = read_strategies(["self-consistency:num=8,early_stop=false"]).values()
    for problem in chosen[:4]:
        run = Run(engine(), seed=run_seed(0, problem))
        live, _ = run_virtual(strategy(run, problem.question, extract=problem.extract, parameters=DRAWN))
        again = on_pool("self-consistency:num=8,early_stop=false", pool, problem)
        assert (live.answer, live.text, live.calls) == (again.answer, again.text, again.calls)
        assert live.summary["tokens_total"] == again.summary["tokens_total"]


@pytest.mark.parametrize(
    ("text", "parameters", "words"),
    [
        ("pdr:schedule=2-1", DRAWN, "asks more: run this strategy on a live engine"),
        ("self-consistency:num=25", DRAWN, "has 24 samples"),
        ("greedy", DRAWN, "temperature=0.8"),
        ("single", replace(DRAWN, max_tokens=9), "max_tokens=60"),
    ],
)
def test_what_is_not_in_the_pool_is_refused(text: str, parameters: Parameters, words: str) -> None:
    pool, chosen = pool_of()
    (strategy,) = read_strategies([text]).values()
    run = Run(PoolEngine(pool, chosen[0]))
    with pytest.raises(EngineError, match=words):
        run_virtual(strategy(run, chosen[0].question, extract=chosen[0].extract, parameters=parameters))


def test_pass_at_is_the_share_of_subsets_with_a_right_one() -> None:
    pool, chosen = pool_of()
    table = score_table(pool, chosen, 7)
    for num in (1, 3, 7):
        for row, share in enumerate(pass_at(table, num)):
            subsets = list(itertools.combinations(table.right[row], num))
            assert share == pytest.approx(np.mean([any(subset) for subset in subsets]))


def test_tables_and_rows() -> None:
    pool, chosen = pool_of()
    texts = ["single", "self-consistency:num=24", "best-of-n:num=24"]
    found = pool_suite(pool, chosen, texts, num=NUM)
    assert [row["strategy"] for row in found["rows"]] == texts
    for row, text in zip(found["rows"], texts, strict=True):
        answers = [on_pool(text, pool, problem) for problem in chosen]
        right = [problem.check(live.answer) for problem, live in zip(chosen, answers, strict=True)]
        assert (row["right"], row["problems"], row["task"]) == (sum(right), 12, "multiplication")
        assert row["low"] <= row["accuracy"] <= row["high"] and row["accuracy"] <= row["pass_at"]
    assert [row["than"] for row in found["differences"]] == ["single", "single"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("majority", "no pool-based strategy"),
        ("single:num=2", "no option 'num'"),
        ("short-m:num=many", "'many' is not a whole number"),
        ("self-consistency:early_stop=1", "'1' is not true or false"),
    ],
)
def test_unknown_twins(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        parse_rescorer(text)


def test_a_pool_without_confidence_has_no_best() -> None:
    pool, chosen = pool_of()
    bare = replace(pool, samples={
        name: {number: replace(made, confidence=None) for number, made in held.items()}
        for name, held in pool.samples.items()
    })  # fmt: skip
    with pytest.raises(ArgumentError, match="no confidence"):
        pool_suite(bare, chosen, ["best-of-n:num=8"], num=NUM)
    assert pool_suite(bare, chosen, ["self-consistency:num=8"], num=NUM)["rows"]
    for text, words in (("self-consistency:num=25", "1 to 24"), ("short-m:num=4,shortest=5", "shortest=5")):
        with pytest.raises(ArgumentError, match=words):
            pool_suite(pool, chosen, [text], num=NUM)


def drawn_pool(chosen: list[Problem]) -> Pool:
    """A pool of 64 samples for each problem, four of ten of them right."""
    pool, draw = Pool(engine="scripted", parameters=DRAWN), np.random.default_rng(0)
    for problem in chosen:
        pool.questions[problem.name], lengths = problem.question, draw.integers(5, 200, 64)
        texts = [problem.gold if draw.random() < 0.4 else str(draw.integers(1, 9)) for _ in range(64)]
        pool.samples[problem.name] = {
            number: Completion(text=f"it is {text}", usage=Usage(completion=int(tokens)), confidence=(2.0, 3.0))
            for number, (text, tokens) in enumerate(zip(texts, lengths, strict=True))
        }
    return pool


@pytest.mark.full
def test_fourteen_strategies_cost_in_proportion_to_the_problems() -> None:
    taken = []
    for num in (100, 600):
        chosen = problems(num)
        pool, begin = drawn_pool(chosen), time.process_time()
        found = pool_suite(pool, chosen, DEFAULT_STRATEGIES)
        taken.append(time.process_time() - begin)
        assert len(found["rows"]) == 14 and len(found["differences"]) == 13
    assert taken[1] < 12 * taken[0]  # quadratic work would be 36 times as much


# --- files ------------------------------------------------------------------------------------------------------------


async def collected(path: Path, num: int, chosen: list[Problem], **more: Any) -> tuple[Pool, int]:
    scripted = more.pop("engine", None) or engine()
    pool = await collect(path, chosen, scripted, num, parameters=DRAWN, **more)
    return pool, len(scripted.asked)


def test_a_pool_grows_and_repeats_nothing(tmp_path: Path) -> None:
    path, chosen = tmp_path / "pool.jsonl", problems(5)
    few, asked = asyncio.run(collected(path, 3, chosen[:3]))
    assert asked == 9 and len(few.of(chosen[0])) == 3
    more, asked = asyncio.run(collected(path, 6, chosen, together=3))
    assert asked == 30 - 9
    assert more.of(chosen[0])[:3] == few.of(chosen[0])
    read = Pool.read(path)
    assert read == more and read.parameters == DRAWN
    kept, _ = pool_of()
    assert [made.text for made in read.of(chosen[1])] == [made.text for made in kept.of(chosen[1])[:6]]


def test_a_line_half_written_is_drawn_again(tmp_path: Path) -> None:
    path, chosen = tmp_path / "pool.jsonl", problems(2)
    whole, _ = asyncio.run(collected(path, 4, chosen))
    kept = path.read_bytes()
    for cut in (1, 40, 700, len(kept) // 2):
        path.write_bytes(kept[:-cut])
        lost = 10 - kept[:-cut].count(b"\n") + 1  # a header, two questions, eight samples
        again, asked = asyncio.run(collected(path, 4, chosen))
        assert again == whole and asked in (lost, lost - 1)
        assert Pool.read(path) == whole


def test_what_failed_keeps_what_was_done(tmp_path: Path) -> None:
    path, chosen, scripted = tmp_path / "pool.jsonl", problems(3), engine()
    plain = scripted.script
    scripted.script = lambda request, draw: (
        replace(plain(request, draw), error=EngineError("away")) if len(scripted.asked) > 7 else plain(request, draw)
    )
    with pytest.raises(EngineError, match="away"):
        asyncio.run(collected(path, 4, chosen, engine=scripted, concurrency=1))
    held = sum(map(len, Pool.read(path).samples.values()))
    assert held == 7
    _, asked = asyncio.run(collected(path, 4, chosen))
    assert asked == 12 - held


def test_pools_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, chosen = tmp_path / "pool.jsonl", problems(2)
    asyncio.run(collected(path, 2, chosen))
    with pytest.raises(ArgumentError, match="seed=0, this is 1"):
        asyncio.run(collected(path, 2, chosen, seed=1))
    with pytest.raises(ArgumentError, match="another question"):
        asyncio.run(collected(path, 2, problems(2, seed=9)))
    with pytest.raises(ArgumentError, match="num=0"):
        asyncio.run(collected(path, 0, chosen))
    pool = Pool.read(path)
    with pytest.raises(ArgumentError, match="no sample 2"):
        pool.of(chosen[0], 3)
    with pytest.raises(ArgumentError, match="nothing of the name"):
        pool.of(problems(3)[2])
    for text, words in (("", "is no pool of version"), ("{]\n", "line 1"), ("[1]\n", "no object")):
        (tmp_path / "odd.jsonl").write_text(text)
        with pytest.raises(ArgumentError, match=words):
            Pool.read(tmp_path / "odd.jsonl")
    (tmp_path / "new.jsonl").write_text(json.dumps({"pool": 2}) + "\n")
    with pytest.raises(ArgumentError, match="no pool of version 1"):
        Pool.read(tmp_path / "new.jsonl")
    with pytest.raises(ArgumentError, match="not there"):
        Pool.read(tmp_path / "none.jsonl")
