"""The loop over problems and strategies: rows, resuming, differences, and the picture."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from partsong.errors import ArgumentError
from partsong.evals.reasoning.intervals import Resampler, clopper_pearson, wilson
from partsong.evals.reasoning.outcome import COUNTS, Outcome, compare_strategies, table_rows
from partsong.evals.reasoning.pareto import COSTS, front, pareto_svg
from partsong.evals.reasoning.suite import evaluate, read_strategies, reasoning_suite
from partsong.reasoning import Budget, Journal, Parameters, Run, ScriptedEngine
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.calls.virtual_time import run_virtual
from tests.evals.reasoning.pools import DRAWN, engine, problems, script

TEXTS = ["greedy", "self-consistency:num=6", "pdr:schedule=3-1,workspace_tokens=50"]


def rows_of(chosen: list[Any], texts: list[str], scripted: ScriptedEngine, **options: Any) -> Any:
    made = reasoning_suite(chosen, read_strategies(texts), scripted, parameters=DRAWN, seed=2, **options)
    return run_virtual(made)[0]


def test_rows_say_what_the_runs_said() -> None:
    chosen = problems(8)
    found = rows_of(chosen, TEXTS, engine(seconds_per_token=0.01))
    assert [row["strategy"] for row in found["rows"]] == TEXTS
    greedy, vote, pdr = found["rows"]
    assert greedy["calls"] == 1 and greedy["problems"] == 8 and greedy["task"] == "multiplication"
    assert vote["calls"] == 6 and pdr["calls"] in (4, 5)
    assert greedy["tokens_total"] == greedy["tokens_critical"] <= vote["tokens_total"]
    assert vote["tokens_critical"] < vote["tokens_total"] and pdr["tokens_accepted"] <= pdr["tokens_critical"]
    for row in found["rows"]:
        assert (row["low"], row["high"]) == wilson(row["right"], 8)
        assert row["accuracy"] == row["right"] / 8 and set(COUNTS) <= set(row)
        assert all(isinstance(value, int | float | str) for value in row.values())
    assert [(row["strategy"], row["than"], row["problems"]) for row in found["differences"]] == [
        (text, "greedy", 8) for text in TEXTS[1:]
    ]


def test_rows_are_means_of_outcomes_and_differences_are_paired() -> None:
    def one(number: int, strategy: str, right: bool, tokens: int, hint: str = "") -> Outcome:
        counts = dict.fromkeys(COUNTS, 0.0) | {"tokens_total": tokens}
        return Outcome(
            task="t", number=number, asked="", strategy=strategy, answer="1" if right else None, right=right,
            stopped="done", hint=hint, counts=counts,
        )  # fmt: skip

    left = [one(k, "a", k % 2 == 0, 10 * k) for k in range(6)]
    right = [one(k, "b", k % 3 != 0, 7, hint="spread" if k > 3 else "") for k in (5, 4, 3, 2, 1, 0)]
    first, second = table_rows([*left, *right], interval=clopper_pearson)
    assert (first["right"], first["tokens_total"], first["unanswered"], first["hints"]) == (3, 25.0, 3, 0)
    assert (second["right"], second["hints"], second["hint"]) == (4, 2, "spread")
    assert (first["low"], first["high"]) == clopper_pearson(3, 6)
    (row,) = compare_strategies([*left, *right], resamples=500, seed=4)
    pair = {"b": [0, 1, 1, 0, 1, 1], "a": [1, 0, 1, 0, 1, 0]}
    wanted = Resampler(pair, resamples=500, seed=4).difference("b", "a")
    assert (row["difference"], row["low"], row["high"], row["p"]) == (wanted.mean, wanted.low, wanted.high, wanted.p)
    assert compare_strategies([*left, *right[:2]])[0]["problems"] == 2
    assert compare_strategies(left, to="b") == []


def test_samples_are_the_same_for_all_strategies_and_together_changes_nothing() -> None:
    chosen, asked = problems(5), ["self-consistency:num=4,early_stop=false", "best-of-n:num=4", "pdr:schedule=3-1"]
    alone, many = engine(seconds_per_token=0.01), engine(seconds_per_token=0.01)
    first = rows_of(chosen, asked, alone)
    second = rows_of(chosen, asked, many, together=5, concurrency=2)
    drop = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in first["rows"]] == [
        {k: v for k, v in row.items() if k not in drop} for row in second["rows"]
    ]
    plain = [request for request in alone.asked if request.path == ("sample",)]
    seeds = {(request.messages[0].text, request.sample): request.seed for request in plain}
    assert all(seeds[request.messages[0].text, request.sample] == request.seed for request in plain)
    assert len(seeds) == 20 and len(plain) == 40


def test_a_stopped_evaluation_goes_on(tmp_path: Path) -> None:
    """It dies in the middle of a problem; finished problems and finished calls are not made again."""
    chosen, texts = problems(6), ["greedy", "self-consistency:num=4,early_stop=false"]
    whole = rows_of(chosen, texts, engine())
    scripted = engine()

    def dies(request: Any, draw: Any) -> Any:
        failed = EngineError("away") if len(scripted.asked) == 6 + 4 + 3 else None
        return replace(script(request, draw), error=failed)

    scripted.script = dies
    kept: dict[str, Any] = {"outcomes": tmp_path / "made.jsonl"}
    seen: list[Outcome] = []
    with Journal(tmp_path / "calls.db") as journal:
        with pytest.raises(EngineError, match="away"):
            rows_of(chosen, texts, scripted, journal=journal, concurrency=1, on_outcome=seen.append, **kept)
        assert len(seen) == 6 + 1
    with Journal(tmp_path / "calls.db") as journal:
        again = engine()
        found = rows_of(chosen, texts, again, journal=journal, on_outcome=seen.append, **kept)
    assert len(seen) == 12 and len(again.asked) == 24 - 4 + 6 - (6 + 2)
    for row, wanted in zip(found["rows"], whole["rows"], strict=True):
        assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in wanted.items() if k != "seconds"}
    silent = engine()
    assert rows_of(chosen, texts, silent, **kept) == found and silent.asked == []


def test_files_of_another_evaluation_are_refused_and_other_questions_asked(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    rows_of(problems(3), ["greedy"], engine(), outcomes=path)
    with pytest.raises(ArgumentError, match="engine='scripted', this is 'other'"):
        rows_of(problems(3), ["greedy"], ScriptedEngine(script, name="other"), outcomes=path)
    asked = engine()
    rows_of(problems(3, seed=7), ["greedy"], asked, outcomes=path)  # the same names, other questions
    assert len(asked.asked) == 3
    path.write_text("no json\n")
    with pytest.raises(ArgumentError, match="is no evaluation"):
        rows_of(problems(3), ["greedy"], engine(), outcomes=path)


def test_budgets_and_real_loops() -> None:
    chosen = problems(3)
    strategies = read_strategies(["self-consistency:num=6,early_stop=false"])
    made = asyncio.run(evaluate(chosen, strategies, engine(), budget=Budget(calls=2), parameters=DRAWN))
    assert [(one.stopped, one.counts["calls"] <= 6) for one in made] == [("budget", True)] * 3


def test_greedy_is_cold_and_the_rest_is_as_given() -> None:
    scripted = engine()
    rows_of(problems(1), ["greedy", "single"], scripted)
    assert [request.parameters for request in scripted.asked] == [replace(DRAWN, temperature=0.0), DRAWN]
    bare = engine()
    asyncio.run(evaluate(problems(1), read_strategies(["single"]), bare))
    assert bare.asked[0].parameters == Parameters()


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["best"], "no strategy 'best'"), (["pdr:schedule=4-2"], "end with 1"), (["edit-test-select"], "needs runner")],
)
def test_strategies_are_read_before_any_is_run(texts: list[str], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        read_strategies(["greedy", *texts])


def test_refused() -> None:
    greedy = read_strategies(["greedy"])
    for chosen, strategies, options, words in (
        ([], greedy, {}, "0 problems"),
        (problems(1), {}, {}, "0 strategies"),
        ([*problems(1), *problems(1)], greedy, {}, "two problems are called multiplication/0"),
        (problems(1), greedy, {"together": 0}, "together=0"),
    ):
        with pytest.raises(ArgumentError, match=words):
            asyncio.run(evaluate(chosen, strategies, engine(), **options))


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_front_is_what_no_other_beats() -> None:
    rows = [
        {"strategy": str(k), "accuracy": a, "tokens_total": t, "tokens_critical": t}
        for k, (a, t) in enumerate([(0.3, 10), (0.5, 40), (0.5, 30), (0.2, 5), (0.2, 9), (0.6, 30), (0.7, 500)])
    ]
    found = front(rows, "tokens_total")
    beaten = [
        row
        for row in rows
        if any(
            other["accuracy"] >= row["accuracy"]
            and other["tokens_total"] <= row["tokens_total"]
            and (other["accuracy"], other["tokens_total"]) != (row["accuracy"], row["tokens_total"])
            for other in rows
        )
    ]
    assert [row["strategy"] for row in found] == ["3", "0", "5", "6"]
    assert {row["strategy"] for row in rows} - {row["strategy"] for row in beaten} == {"3", "0", "5", "6"}


def test_the_picture_is_whole_and_shows_every_row() -> None:
    found = rows_of(problems(4), TEXTS, engine(seconds_per_token=0.01))
    rows = [*found["rows"], dict(found["rows"][0], strategy="<b>&odd", tokens_total=0.0)]
    said = pareto_svg(rows, title="a & b")
    root = ElementTree.fromstring(said)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a & b" in texts and any("<b>&odd" in str(text) for text in texts)
    assert set(COSTS.values()) <= set(texts)
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == len(rows) * (1 + len(COSTS))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= float(c.attrib["cx"]) <= width and 0 <= float(c.attrib["cy"]) <= height for c in circles)
    assert "href" not in said and "url(" not in said
    with pytest.raises(ArgumentError, match="one task"):
        pareto_svg([*rows, dict(rows[0], task="other")])
    with pytest.raises(ArgumentError, match="one task"):
        pareto_svg([])


def test_a_run_of_a_problem_has_a_name_of_its_own() -> None:
    names: list[str] = []

    async def spy(run: Run, question: str, **more: Any) -> Any:
        names.append(run.name)
        return await read_strategies(["greedy"])["greedy"](run, question, **more)

    asyncio.run(evaluate(problems(2), {"one": spy, "other": spy}, engine()))
    assert len(set(names)) == 4
