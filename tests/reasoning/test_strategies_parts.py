"""Strategies that take a question apart, or prune what repeats: calls by hand, and what they do with odd replies."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Budget, Line, Parameters, Request, Run, ScriptedEngine, final_number
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import ProblemSplit, decompose, deepprune, plan_search, skeleton_of_thought
from partsong.reasoning.strategies.prompts import fill, listed
from partsong.reasoning.strategies.splits import read_split


def run_of(strategy: Any, script: Any, seed: int = 0, budget: Budget | None = None, **knobs: Any) -> Any:
    engine = ScriptedEngine(script, seconds_per_token=1.0, chunk=1)
    run = Run(engine, seed=seed, budget=budget, concurrency=1000)
    answer, seconds = run_virtual(strategy(run, "the question", **{"extract": final_number, **knobs}))
    return answer, run, engine, seconds


# --- DeepPrune --------------------------------------------------------------------------------------------------------

#: What ten samples are heading for.
HEADING = [7, 8, 7, 7, 9, 8, 7, 8, 7, 7]


def traces(request: Request, draw: random.Random) -> Line:
    """Beginnings of 5 tokens that name where they lead; the rest is 20 tokens."""
    if request.path[0] == "judge":
        first, second = (int(word) for word in request.path[1].split(" and "))
        return Line(text="Yes." if HEADING[first] == HEADING[second] else "No.", tokens=1)
    if request.path == ("begin",):
        return Line(text=f"towards {HEADING[request.sample]} and so on", tokens=25)
    goal = request.messages[1].text.split()[1]
    return Line(text=f" hence {goal}", tokens=20)


def judge(question: str, one: str, other: str) -> float:
    return float(one.split()[1] == other.split()[1])


OPTIONS: dict[str, Any] = {"num": 10, "prefix_tokens": 5, "parameters": Parameters(max_tokens=100)}


def test_only_one_of_a_kind_is_finished() -> None:
    answer, run, _, seconds = run_of(deepprune, traces, judge=judge, **OPTIONS)
    assert answer.details["clusters"] == [[0, 2, 3, 6, 8, 9], [1, 5, 7], [4]]
    assert [n for n in run.graph.nodes if n.startswith("finish")] == ["finish#0", "finish#1", "finish#4"]
    assert answer.summary["tokens_total"] == 10 * 5 + 3 * 20
    assert answer.summary["tokens_critical"] == answer.summary["tokens_accepted"] == 25 == seconds
    assert run.graph.nodes["finish#0"].request.parameters.max_tokens == 95


def test_sizes_with_a_judge_that_is_right_are_the_full_vote() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        HEADING[:] = [draw.choice([7, 7, 8, 9]) for _ in range(10)]
        expected = max(dict.fromkeys(HEADING), key=HEADING.count)
        for keep in (1, 2):
            answer, _, _, _ = run_of(deepprune, traces, judge=judge, vote="sizes", keep=keep, **OPTIONS)
            assert answer.answer == str(expected)
    HEADING[:] = [7, 8, 7, 7, 9, 8, 7, 8, 7, 7]


def test_the_model_as_a_judge_costs_what_it_says() -> None:
    """With one member per group: sample i is compared with as many groups as there are by then."""
    answer, run, _, seconds = run_of(deepprune, traces, members=1, **OPTIONS)
    assert answer.details["clusters"] == [[0, 2, 3, 6, 8, 9], [1, 5, 7], [4]]
    judged = [name for name in run.graph.nodes if name.startswith("judge")]
    assert len(judged) == 0 + 1 + 2 + 2 + 2 + 3 + 3 + 3 + 3 + 3
    # Nine comparisons one after another, each of one token, between the beginnings and the rest.
    assert answer.summary["tokens_critical"] == 5 + 9 + 20 == seconds
    assert run.graph.nodes["judge/0 and 2#0"].reads == ("begin#0", "begin#2")


def test_groups_are_bounded() -> None:
    answer, _, _, _ = run_of(deepprune, traces, judge=lambda q, a, b: 0.0, most_clusters=3, **OPTIONS)
    assert [len(group) for group in answer.details["clusters"]] == [8, 1, 1]
    with pytest.raises(ArgumentError, match="prefix_tokens=5 of max_tokens=5"):
        run_of(deepprune, traces, prefix_tokens=5, parameters=Parameters(max_tokens=5))


# --- decomposition ----------------------------------------------------------------------------------------------------

PLAN = 'Yes: {"template": "Double [DATA]", "context": "Be short.", "data": [1, 2, 3]}'


def parts(request: Request, draw: random.Random) -> Line:
    if request.path == ("plan",):
        return Line(text=PLAN, tokens=10)
    if request.path == ("part",):
        return Line(text=str(2 * (request.sample + 1)), tokens=20 + request.sample)
    return Line(text="2, 4 and 6", tokens=5)


def test_parts_are_answered_at_once() -> None:
    answer, _, engine, seconds = run_of(decompose, parts, extract=str.strip)
    assert answer.answer == "2\n\n4\n\n6" and answer.details == {"parts": 3, "cut": []}
    assert engine.asked[2].messages[0].text == "Be short.\n\nDouble 2"
    assert answer.calls == ("part#0", "part#1", "part#2")
    assert answer.summary["tokens_critical"] == answer.summary["tokens_accepted"] == 10 + 22 == seconds


def test_parts_are_joined_by_a_last_call() -> None:
    answer, run, _, seconds = run_of(decompose, parts, join=True)
    assert answer.text == "2, 4 and 6" and answer.calls == ("join#0",)
    assert run.graph.nodes["join#0"].reads == ("part#0", "part#1", "part#2")
    assert answer.summary["tokens_critical"] == 10 + 22 + 5 == seconds


def test_known_parts_need_no_plan() -> None:
    split = ProblemSplit(template="Say [DATA]", data=("x", "y"))
    answer, _, engine, _ = run_of(decompose, parts, split=split)
    assert [request.messages[0].text for request in engine.asked] == ["Say x", "Say y"]
    assert answer.summary["calls"] == 2
    with pytest.raises(ArgumentError, match="has no data"):
        run_of(decompose, parts, split=ProblemSplit(template="[DATA]", data=()))


def test_a_question_without_parts_is_asked_as_it_is() -> None:
    script: Any = lambda request, draw: Line(text='{"serial": true}' if request.path == ("plan",) else "7", tokens=4)  # noqa: E731
    answer, _, _, seconds = run_of(decompose, script)
    assert (answer.answer, answer.details, answer.calls) == ("7", {"parts": 1}, ("whole/sample#0",))
    assert answer.summary["tokens_critical"] == 8 == seconds and answer.summary["tokens_accepted"] == 4


@pytest.mark.parametrize(
    "text",
    [
        "no object at all",
        "{broken",
        '{"serial": true}',
        "[1, 2]",
        '{"template": "x [DATA]", "data": ["one"]}',
        '{"template": "without a gap", "data": ["one", "two"]}',
        '{"template": "[DATA]", "data": ["one", "two"], "n": 2}',
        '{"template": "[DATA]", "data": ["one", {"two": 2}]}',
        '{"template": "x", "n": 99999999999}',
        '{"template": "x", "n": true}',
        '{"template": 3, "n": 2}',
        '{"template": "x", "n": 2, "context": ["y"]}',
        "{" * 5000 + "}" * 5000,
    ],
)
def test_odd_plans_are_none(text: str) -> None:
    assert read_split(text, 8) is None


def test_repetitions_need_no_data() -> None:
    assert read_split('{"template": "A poem", "n": 3}', 8) == ProblemSplit(template="A poem", data=("1", "2", "3"))


# --- skeletons and plans ----------------------------------------------------------------------------------------------


def skeleton(request: Request, draw: random.Random) -> Line:
    if request.path == ("skeleton",):
        return Line(text="1. Eat\n2. Sleep\n3. Read\n4. Rest", tokens=9)
    return Line(text=f"text {request.sample}", tokens=30 - request.sample)


def test_points_are_written_at_once() -> None:
    answer, run, _, seconds = run_of(skeleton_of_thought, skeleton, extract=str.strip, most=3)
    assert answer.text == "1. Eat\ntext 0\n\n2. Sleep\ntext 1\n\n3. Read\ntext 2"
    assert answer.summary["tokens_critical"] == 9 + 30 == seconds
    assert answer.summary["tokens_total"] == 9 + 30 + 29 + 28
    assert run.graph.nodes["point#2"].reads == ("skeleton#0",)
    cut, _, _, _ = run_of(skeleton_of_thought, skeleton, extract=str.strip, most=3, point_tokens=29)
    assert cut.answer is None and cut.details["cut"] == [0]


def plans(request: Request, draw: random.Random) -> Line:
    kind = request.path[0]
    tokens = {"observe": 10, "derive": 20, "plan": 30, "criticise": 40}.get(kind, 5)
    if kind == "observe":
        return Line(text="Here they are:\n- first\n- second\n- third\n- fourth\n- fifth", tokens=tokens)
    if kind.endswith("solve"):
        return Line(text=f"{8 if kind == 'solve' else 7 + request.sample % 2}", tokens=tokens)
    return Line(text=f"{kind} {request.sample}", tokens=tokens)


@pytest.mark.parametrize(("observations", "combine"), [(4, 2), (3, 3), (2, 1)])
def test_plans_by_hand(observations: int, combine: int) -> None:
    subsets = sum(math.comb(observations, size) for size in range(1, combine + 1))
    answer, run, engine, seconds = run_of(
        plan_search, plans, observations=observations, combine=combine, num=100, critique=True
    )
    assert answer.summary["calls"] == 1 + 7 * subsets
    assert answer.details["plans"] == answer.details["votes"] == 2 * subsets
    # Observe, derive, plan, criticise, outline, solve.
    assert answer.summary["tokens_critical"] == 10 + 20 + 30 + 40 + 5 + 5 == seconds
    assert answer.answer == "8"  # all first plans and some of the mended ones
    assert run.graph.nodes["plan#0"].reads == ("observe#0", "derive#0")
    second = next(r for r in engine.asked if r.path == ("derive",) and r.sample == subsets - 1)
    assert second.messages[0].text.count("\n- ") == combine


def test_fewer_plans_are_drawn_by_the_seed() -> None:
    drawn = [run_of(plan_search, plans, seed, num=3, critique=False)[2].asked[1].messages[0].text for seed in range(6)]
    assert len(set(drawn)) > 1
    answer, _, _, _ = run_of(plan_search, plans, num=3, critique=False)
    assert answer.summary["calls"] == 1 + 4 * 3
    scored, _, _, _ = run_of(plan_search, plans, num=4, scorer=lambda solution: -len(solution.source))
    assert scored.calls == ("solve#0",)


def test_lists_and_gaps_are_read_as_text() -> None:
    assert listed("1) one\n\n * two\n(3) three\nrest") == ["one", "two", "three"]
    assert listed("one\n\ntwo ") == ["one", "two"]
    assert fill("{{{x}}}", x="{y}") == ("{", "{y}", "}")
