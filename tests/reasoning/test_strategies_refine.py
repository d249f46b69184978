"""Strategies that write over earlier texts: who reads whom, calls and tokens counted by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Budget, Line, Parameters, Request, Run, ScriptedEngine, final_number, pdr
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import (
    PdrPrompts,
    RefinementPrompts,
    compute_optimal,
    rsa,
    self_consistency,
    sequential_refinement,
)
from partsong.seeds import derive


def run_of(strategy: Any, script: Any, seed: int = 0, budget: Budget | None = None, **knobs: Any) -> Any:
    engine = ScriptedEngine(script, seconds_per_token=1.0, chunk=1)
    run = Run(engine, seed=seed, budget=budget)
    answer, seconds = run_virtual(strategy(run, "the question", **{"extract": final_number, **knobs}))
    return answer, run, engine, seconds


def countdown(request: Request, draw: random.Random) -> Line:
    number = int(request.path[0].split()[1])
    return Line(text=f"draft {number} says {9 - number}", tokens=10 + number)


def test_each_draft_is_written_over_the_last() -> None:
    answer, run, engine, seconds = run_of(sequential_refinement, countdown, rounds=3)
    assert answer.answer == "7" and answer.details["rounds"] == ["9", "8", "7"]
    assert [run.graph.nodes[f"round {i}#0"].reads for i in range(3)] == [(), ("round 0#0",), ("round 1#0",)]
    assert "draft 1 says 8" in engine.asked[2].messages[0].text
    assert "draft 0" not in engine.asked[2].messages[0].text
    cost = answer.summary
    assert cost["tokens_accepted"] == cost["tokens_critical"] == cost["tokens_total"] == 10 + 11 + 12 == seconds


def test_a_draft_that_ran_out_of_tokens_is_left_out() -> None:
    def script(request: Request, draw: random.Random) -> Line:
        return replace(countdown(request, draw), tokens=50 if request.path[0] == "round 1" else 5)

    answer, run, _, seconds = run_of(sequential_refinement, script, rounds=3, parameters=Parameters(max_tokens=20))
    assert answer.details["rounds"] == ["9", None, "7"]
    assert run.graph.nodes["round 2#0"].reads == ("round 0#0",)
    assert run.graph.nodes["round 2#0"].waits == ("round 1#0",)
    assert answer.summary["tokens_accepted"] == 10
    assert answer.summary["tokens_critical"] == 30 == seconds


def test_it_stops_when_drafts_agree() -> None:
    script: Any = lambda request, draw: Line(text="7" if request.path[0] != "round 0" else "8")  # noqa: E731
    answer, _, _, _ = run_of(sequential_refinement, script, rounds=9, stable=3)
    assert (answer.stopped, answer.details["rounds"]) == ("confident", ["8", "7", "7", "7"])


def population(request: Request, draw: random.Random) -> Line:
    tokens = draw.randint(1, 60)
    return Line(text=f"{request.path[0]} place {request.sample} says {draw.choice([7, 7, 8])}", tokens=tokens)


@pytest.mark.parametrize("seed", range(4))
def test_generations_overlap(seed: int) -> None:
    """The critical path is the longest chain of readings, worked out from the seed; with barriers it were longer."""
    answer, run, _, seconds = run_of(rsa, population, seed, population=6, aggregate=2, generations=4, early_stop=False)
    tokens = {name: node.tokens for name, node in run.graph.nodes.items()}
    ready: list[dict[int, int]] = []
    for number in range(4):
        ready.append({})
        for place in range(6):
            draw = random.Random(derive(seed, "rsa", number, place))
            read = draw.sample(range(6), 2) if number else []
            node = run.graph.nodes[f"generation {number}#{place}"]
            assert set(node.reads) == {f"generation {number - 1}#{i}" for i in read}
            ready[number][place] = tokens[node.name] + max((ready[number - 1][i] for i in read), default=0)
    barriers = sum(max(tokens[f"generation {n}#{i}"] for i in range(6)) for n in range(4))
    assert answer.summary["tokens_critical"] == max(ready[-1].values()) == seconds <= barriers
    assert answer.summary["calls"] == 24 and answer.summary["tokens_total"] == sum(tokens.values())
    last = [final_number(str(run.graph.nodes[f"generation 3#{i}"].completion.text)) for i in range(6)]
    assert answer.answer == max(dict.fromkeys(last), key=last.count)


def test_a_budget_leaves_the_newest_solution_of_each_place() -> None:
    answer, run, _, _ = run_of(rsa, population, 3, Budget(calls=9), population=6, aggregate=2, generations=4)
    assert answer.stopped == "budget" and answer.details["generations"] == 1
    newest: dict[int, Any] = {}
    for node in run.graph.nodes.values():
        if node.completion is not None and node.completion.finish == "stop":
            newest[node.request.sample] = final_number(node.completion.text)
    votes = [newest[i] for i in range(6)]
    assert answer.answer == max(dict.fromkeys(votes), key=votes.count)


def test_the_workspace_is_bounded() -> None:
    """Two drafts of 100 tokens in a workspace of 50: the last quarter of each."""

    def script(request: Request, draw: random.Random) -> Line:
        return Line(text="x" * 300 + "y" * 99 + "7", tokens=100)

    _, _, engine, _ = run_of(pdr, script, schedule=(3, 1), distillation="shared-top-k", keep=2, workspace_tokens=50)
    text = engine.asked[-1].messages[0].text
    assert text.count("y" * 99 + "7") == 2 and "x" * 20 not in text
    _, _, engine, _ = run_of(pdr, script, schedule=(3, 1), distillation="summary", workspace_tokens=50)
    assert engine.asked[3].parameters.max_tokens == 50


def test_texts_may_be_other_texts() -> None:
    german = RefinementPrompts(first="Frage: {question}", again="Frage: {question} Entwurf: {draft}")
    _, _, engine, _ = run_of(sequential_refinement, countdown, rounds=2, prompts=german)
    texts = [request.messages[0].text for request in engine.asked]
    assert texts == ["Frage: the question", "Frage: the question Entwurf: draft 0 says 9"]


@pytest.mark.parametrize(
    ("strategy", "knobs", "words"),
    [
        (sequential_refinement, {"prompts": RefinementPrompts(again="{question}")}, r"needs \{draft\}, \{question\}"),
        (sequential_refinement, {"prompts": RefinementPrompts(first="{")}, "prompt first cannot be read"),
        (pdr, {"prompts": RefinementPrompts()}, "use an instance of PdrPrompts"),
        (pdr, {"prompts": PdrPrompts(attempt="{text} {text} {other}")}, r"prompt attempt has \{other\}, \{text\}"),
        (rsa, {"aggregate": 17}, "aggregate=17 of a population=16"),
        (compute_optimal, {"choices": (pdr,), "edges": (0.5,)}, "1 choices need 0 ascending edges"),
    ],
)
def test_refused_before_any_call(strategy: Any, knobs: dict[str, Any], words: str) -> None:
    engine = ScriptedEngine(countdown)
    with pytest.raises(ArgumentError, match=words):
        run_virtual(strategy(Run(engine), "q", extract=final_number, **knobs))
    assert engine.asked == []


@pytest.mark.parametrize(("agree", "place"), [(4, 0), (3, 1), (2, 1), (1, 2)])
def test_difficulty_chooses(agree: int, place: int) -> None:
    """Four probes of which some agree: shares of 1, 3/4, 1/2 and 1/4 against edges at 0.4 and 0.9."""
    called: list[str] = []

    def choice(name: str) -> Any:
        async def chosen(run: Run, question: str, **more: Any) -> Any:
            called.append(name)
            return await self_consistency(run, question, num=2, **more)

        return chosen

    def script(request: Request, draw: random.Random) -> Line:
        chosen = request.path[0] != "probe"
        return Line(text="5" if chosen else "7" if request.sample < agree else str(20 + request.sample), tokens=10)

    options = [choice(name) for name in ("easy", "middle", "hard")]
    answer, _, _, seconds = run_of(compute_optimal, script, choices=options, edges=(0.4, 0.9))
    assert called == [("easy", "middle", "hard")[place]]
    assert (answer.answer, answer.details["bin"], answer.details["ease"]) == ("5", place, agree / 4)
    assert answer.calls == ("chosen/sample#0",)
    # The chosen strategy waits for the probes, though it reads none of them.
    assert answer.summary["tokens_accepted"] == 10 and answer.summary["tokens_critical"] == 20 == seconds
    assert answer.summary["calls"] == 6


def test_a_scorer_estimates_the_difficulty() -> None:
    answer, _, _, _ = run_of(
        compute_optimal,
        lambda request, draw: Line(text="7"),
        choices=(sequential_refinement, pdr),
        scorer=lambda completion: 0.2,
        probes=2,
    )
    assert (answer.details["bin"], answer.details["ease"]) == (1, 0.2)
