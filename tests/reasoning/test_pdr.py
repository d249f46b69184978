"""Parallel-Distill-Refine: what each round reads under each distillation, and what it costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Budget, Line, Parameters, Request, Run, ScriptedEngine, final_number, pdr
from partsong.reasoning.calls.virtual_time import run_virtual

#: Answers of the four first drafts: three say 7, one says 9; the second is the first that says 9.
FIRST = ["a 7", "b 9", "c 7", "d 7"]


def script(request: Request, draw: random.Random) -> Line:
    """Drafts name themselves, so that prompts show what they read."""
    if request.path[0] == "round 0":
        return Line(text=FIRST[request.sample], tokens=10 + request.sample)
    if request.path[1] == "distil":
        return Line(text="seven, by three of four", tokens=5)
    return Line(text=f"again 7 from {request.sample}", tokens=20)


def run_of(distillation: Any, schedule: tuple[int, ...] = (4, 2, 1), **more: Any) -> tuple[Any, Run, ScriptedEngine]:
    engine = ScriptedEngine(script)
    run = Run(engine, seed=1, **more)
    options: dict[str, Any] = {"extract": final_number, "schedule": schedule, "distillation": distillation}
    answer, _ = run_virtual(pdr(run, "the question", **options))
    return answer, run, engine


def read_by(run: Run, name: str) -> list[str]:
    return [source.removeprefix("round 0/draft#") for source in run.graph.nodes[name].reads]


def test_a_summary_of_all_drafts() -> None:
    answer, run, engine = run_of("summary")
    assert answer.answer == "0"  # the last number of "again 7 from 0"
    assert read_by(run, "round 1/distil#0") == ["0", "1", "2", "3"]
    assert run.graph.nodes["round 1/draft#1"].reads == ("round 1/distil#0",)
    text = next(r for r in engine.asked if r.path == ("round 1", "draft")).messages[0].text
    assert "the question" in text and "seven, by three of four" in text and "b 9" not in text
    # The longest of each round and the two summaries: the chain of waiting is that of reading here.
    assert answer.summary["tokens_critical"] == answer.summary["tokens_accepted"] == 13 + 5 + 20 + 5 + 20
    assert answer.summary["tokens_total"] == 10 + 11 + 12 + 13 + 5 + 40 + 5 + 20
    assert answer.summary["calls"] == 4 + 1 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("distillation", "first", "second"),
    [("shared-top-k", ["0", "2"], ["0", "2"]), ("per-sample-top-k", ["0", "2"], ["0", "3"])],
)
def test_the_best_drafts_are_read(distillation: str, first: list[str], second: list[str]) -> None:
    """Those whose answer most share; 9 comes last."""
    answer, run, _ = run_of(distillation)
    assert [read_by(run, f"round 1/draft#{i}") for i in range(2)] == [first, second]
    # It waited for the slowest draft of the first round, which nobody may have read.
    assert answer.summary["tokens_critical"] == 13 + 20 + 20
    assert answer.summary["tokens_accepted"] == (12 if distillation == "shared-top-k" else 13) + 20 + 20


def test_random_drafts_follow_the_seed() -> None:
    chosen = [[read_by(run_of("random-k", (4, 3, 1))[1], f"round 1/draft#{i}") for i in range(3)] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert all(len(set(kept)) == 2 for kept in chosen[0])


def test_a_budget_leaves_the_best_so_far() -> None:
    answer, _, _ = run_of("shared-top-k", budget=Budget(calls=5))
    assert (answer.stopped, answer.answer, answer.text) == ("budget", "7", "a 7")
    assert answer.details["rounds"] == [["7", "9", "7", "7"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": (4, 2)}, "end with 1"),
        ({"schedule": ()}, "end with 1"),
        ({"schedule": (0, 1)}, "positive integers"),
        ({"distillation": "best"}, "distillation='best'; use summary, shared-top-k"),
        ({"keep": 0}, "keep=0"),
        ({"parameters": Parameters(), "workspace_tokens": 0}, "workspace_tokens=0"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        run_virtual(pdr(Run(ScriptedEngine(script)), "q", extract=final_number, **options))
