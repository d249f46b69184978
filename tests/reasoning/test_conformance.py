"""Every strategy on every engine: it ends, keeps to a budget, goes on where it was, replays, depends on nothing else.

An engine joins by a fixture: a function of nothing that gives a fresh engine. Those that answer as they like are held
to all but `test_it_answers`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from partsong.reasoning import (
    Answer,
    Budget,
    Engine,
    Journal,
    Line,
    Parameters,
    Request,
    Run,
    ScriptedEngine,
    final_number,
)
from partsong.reasoning.answers.extract_code import final_code
from partsong.reasoning.answers.sandbox import SandboxOutcome
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import STRATEGIES, self_consistency, sequential_refinement

QUESTION = "What is three and four?"


class Pretending:
    """Runs nothing: a test passes where the program names the number it asks for."""

    async def run(self, program: str) -> SandboxOutcome:
        wanted = program.split("wanted ")[1].split()[0] if "wanted " in program else "?"
        word = program.rsplit("print('", 1)[1].split("'")[0]
        good = f"answer {wanted}" in program
        return SandboxOutcome(passed=good, output=word if good else f"not {wanted}", code=0 if good else 1)


async def score(question: str, trace: Any) -> float:
    return 0.8 if "7" in trace.text else 0.3


#: Knobs with which a strategy makes some tens of calls; those that are not here run with their defaults.
KNOBS: dict[str, dict[str, Any]] = {
    "single": {},
    "self-consistency": {"num": 12},
    "adaptive-consistency": {"num": 12, "width": 3},
    "best-of-n": {"num": 8, "selection": "borda"},
    "short-m": {"num": 12, "shortest": 5},
    "deepconf": {"num": 16, "warmup": 6, "top": 0.5, "group": 4, "width": 4},
    "deepprune": {"num": 5, "prefix_tokens": 6},
    "parallel-probe": {"num": 5, "interval": 40, "stable": 3},
    "sequential-refinement": {"rounds": 5, "stable": 3},
    "pdr": {"schedule": (5, 3, 1), "distillation": "random-k"},
    "rsa": {"population": 6, "aggregate": 2, "generations": 3},
    "particle-filtering": {"particles": 5, "scorer": score},
    "particle-gibbs": {"particles": 4, "iterations": 2, "scorer": score},
    "beam-search": {"beams": 2, "width": 3, "scorer": score},
    "dvts": {"trees": 3, "width": 2, "scorer": score, "selection": "weighted"},
    "compute-optimal": {
        "probes": 3,
        "choices": (partial(self_consistency, num=4), partial(sequential_refinement, rounds=3)),
    },
    "plan-search": {"observations": 3, "num": 4},
    "edit-test-select": {"runner": Pretending(), "trajectories": 3, "extract": partial(final_code, language=None)},
    "decompose": {"join": True},
    "skeleton-of-thought": {},
    "fork-join": {"format": "multiverse", "thread_tokens": 40},
}
#: Votes that may stop before all samples are in, and never with another answer.
LOSSLESS = ("self-consistency", "short-m", "rsa")


def script(request: Request, draw: random.Random) -> Line:
    """Says what the branch asks for; where that is an answer, mostly 7."""
    answer, kind = (7 if draw.random() < 0.6 else draw.randint(8, 10)), request.path[-1]
    tokens = 8 + draw.randrange(60)
    if kind in ("code", "test", "duel") or kind.startswith("mend"):
        word = "wanted" if kind in ("test", "duel") else "answer"
        return Line(text=f"CODE\n```\n# {word} {answer} \n```", tokens=tokens)
    text = {
        "plan": '{"template": "Say [DATA]", "data": ["one", "two", "three"]}',
        "skeleton": "1. one point\n2. two points",
        "observe": "- it is small\n- it is odd\n- it is a sum",
        "derive": "- it is prime",
        "choose": "2",
    }.get(kind, f"so it is {answer}")
    if kind == "text" and len(request.path) < 4 and request.sample == 0:
        text = "<Parallel><Goal><Outline>1: add</Outline><Outline>2: double</Outline>"
    if kind.startswith("step"):
        text += ", the final answer" if kind != "step 0" and draw.random() < 0.5 else ""
    if any(part.startswith("judge") for part in request.path):
        text, tokens = ("yes" if draw.random() < 0.5 else "no"), 1
    return Line(text=text, tokens=tokens, confidence=tuple(draw.uniform(1, 9) for _ in range(tokens)))


def scripted(**more: Any) -> ScriptedEngine:
    return ScriptedEngine(script, seconds_per_token=0.01, seconds_to_first=0.05, chunk=2, **more)


@pytest.fixture(params=["scripted"])
def make(request: pytest.FixtureRequest) -> Callable[[], Engine]:
    return {"scripted": scripted}[request.param]


@pytest.fixture(params=sorted(STRATEGIES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def think(name: str, engine: Engine, seed: int = 1, more: dict[str, Any] | None = None, **options: Any) -> Any:
    """The answer, the run and the seconds it took."""
    arguments: dict[str, Any] = {"extract": final_number, "parameters": Parameters(max_tokens=100)}

    async def main() -> tuple[Answer, Run]:
        run = Run(engine, seed=seed, **options)
        return await STRATEGIES[name](run, QUESTION, **{**arguments, **KNOBS.get(name, {}), **(more or {})}), run

    (answer, run), seconds = run_virtual(main())
    return answer, run, seconds


def record_of(answer: Answer) -> str:
    """All there is to an answer, as text."""
    kept = {name: getattr(answer, name) for name in ("answer", "text", "calls", "stopped", "summary", "details")}
    return json.dumps(kept, default=str)


def test_all_are_here() -> None:
    assert set(KNOBS) <= set(STRATEGIES)


def test_it_ends(name: str, make: Callable[[], Engine]) -> None:
    answer, run, _ = think(name, make())
    summary = answer.summary
    assert answer.stopped in ("done", "decided", "confident")
    assert set(answer.calls) <= set(run.graph.nodes)
    assert summary["tokens_accepted"] <= summary["tokens_critical"] <= summary["tokens_total"]
    assert summary["tokens_total"] == sum(node.tokens for node in run.graph.nodes.values())
    assert all(node.completion is not None and node.end is not None for node in run.graph.nodes.values())


def test_it_answers(name: str) -> None:
    answer, _, _ = think(name, scripted())
    assert answer.answer is not None
    assert answer.calls


def test_a_question_without_an_answer_to_extract_gets_its_text(name: str) -> None:
    answer, _, _ = think(name, scripted(), more={"extract": lambda text: None})
    runs_programs = name == "edit-test-select"  # where no text holds a program, none has passed, and it shows none
    assert answer.answer is None and bool(answer.text.strip()) == bool(answer.calls) == (not runs_programs)
    if "votes" in answer.details:
        assert answer.details["votes"] == answer.details["spoilt"] > 0
        assert answer.text in answer.details["texts"] and answer.details["hint"].startswith("no vote: none of the")


def test_the_critical_path_is_the_time_it_takes(name: str) -> None:
    """With as many workers as calls and only tokens to wait for, in virtual time: to the report's grain."""
    engine = ScriptedEngine(script, seconds_per_token=1.0, chunk=1)
    answer, run, seconds = think(name, engine, concurrency=1000)
    # A cancelled call ends with what cancelled it; nothing waits for it.
    halted = any(node.completion.finish == "halted" for node in run.graph.nodes.values())
    assert 0 <= seconds - answer.summary["tokens_critical"] <= (1 if halted else 0)


@pytest.mark.parametrize("limit", [{"tokens": 90}, {"calls": 4}, {"tokens": 1}, {"seconds": 0.3}])
def test_it_keeps_to_a_budget(name: str, make: Callable[[], Engine], limit: dict[str, Any]) -> None:
    whole, _, _ = think(name, make())
    answer, run, seconds = think(name, make(), budget=Budget(**limit))
    used = sum(node.completion is not None and node.tokens > 0 for node in run.graph.nodes.values())
    # The last report of each running call may go beyond the limit by its two tokens.
    assert answer.summary["tokens_total"] <= limit.get("tokens", 1e9) + 2 * len(run.graph.nodes)
    assert used <= limit.get("calls", 1e9)
    assert seconds <= limit.get("seconds", 1e9) + 1e-9
    cost = {"tokens": whole.summary["tokens_total"], "calls": whole.summary["calls"]}
    if all(cost.get(what, 1e9) > most for what, most in limit.items()) and "seconds" not in limit:
        assert answer.stopped == "budget"


def test_it_goes_on_where_it_was(name: str, make: Callable[[], Engine], tmp_path: Path) -> None:
    """Stopped by a budget, then without one: the same answer, and no completed call again."""
    whole, graph, _ = think(name, make())
    for calls in {1, 2, len(graph.graph.nodes) // 2 + 1}:
        path = tmp_path / f"{calls}.db"
        with Journal(path) as journal:
            _, first, _ = think(name, make(), journal=journal, budget=Budget(calls=calls))
        complete = {n.request.key for n in first.graph.nodes.values() if n.completion and n.completion.finish == "stop"}
        engine = make()
        with Journal(path) as journal:
            answer, _, _ = think(name, engine, journal=journal)
        assert answer.answer == whole.answer
        if whole.stopped != "decided":  # else which of the samples that agree was first is a matter of time
            assert (answer.text, answer.calls) == (whole.text, whole.calls)
        assert not complete & {request.key for request in getattr(engine, "asked", [])}


@pytest.mark.parametrize("budget", [None, Budget(calls=5), Budget(tokens=120)])
def test_a_replay_is_the_run(name: str, make: Callable[[], Engine], tmp_path: Path, budget: Budget | None) -> None:
    with Journal(tmp_path / "j.db") as journal:
        first, _, _ = think(name, make(), journal=journal, budget=budget)
    engine = make()
    with Journal(tmp_path / "j.db", replay=True) as journal:
        again, _, _ = think(name, engine, journal=journal, budget=budget)
    assert record_of(again) == record_of(first)
    assert getattr(engine, "asked", []) == []


@pytest.mark.parametrize("seed", range(3))
def test_concurrency_changes_time_alone(name: str, make: Callable[[], Engine], seed: int) -> None:
    one, _, slow = think(name, make(), seed, concurrency=1)
    many, _, fast = think(name, make(), seed, concurrency=64)
    assert one.answer == many.answer
    if not {one.stopped, many.stopped} & {"decided"}:
        assert (one.text, one.details) == (many.text, many.details)
    assert fast <= slow


@pytest.mark.parametrize("vote", LOSSLESS)
@pytest.mark.parametrize("seed", range(12))
def test_an_early_stop_is_the_full_vote(vote: str, seed: int) -> None:
    early, _, _ = think(vote, scripted(), seed)
    full, _, _ = think(vote, scripted(), seed, more={"early_stop": False})
    assert early.answer == full.answer
    assert early.summary["tokens_total"] <= full.summary["tokens_total"]
    assert full.stopped == "done" and full.summary["tokens_cancelled"] == 0
