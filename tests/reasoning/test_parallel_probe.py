"""Parallel-Probe by hand: when it stops, what it cuts, what votes, and what it costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Budget, Line, Parameters, Request, Run, ScriptedEngine, final_number
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import parallel_probe

#: Tokens of a part, and of an answer to a probe.
PART, SAID = 10, 2


def probed(answers: Sequence[Sequence[int]], budget: Budget | None = None, **knobs: Any) -> Any:
    """Samples that name `answers` one after another when they are asked, and end by naming the last one."""

    def script(request: Request, draw: random.Random) -> Line:
        mine, place = answers[request.sample], int(request.path[1])
        if request.path[0] == "probe":
            return Line(text=f"{mine[place]}}}.", tokens=SAID)
        if place == len(mine) - 1:  # the last part, which the model ends by itself
            return Line(text=f" hence {mine[-1]}", tokens=PART // 2)
        return Line(text=f" part {'x' * 40}", tokens=10 * PART)

    engine = ScriptedEngine(script, seconds_per_token=1.0, chunk=1)
    run = Run(engine, seed=0, budget=budget, concurrency=1000)
    options: dict[str, Any] = {"interval": PART, "parameters": Parameters(max_tokens=100), **knobs}
    call = parallel_probe(run, "the question", extract=final_number, num=len(answers), **options)
    answer, seconds = run_virtual(call)
    return answer, run, seconds


def test_all_stop_when_one_answer_has_led_for_long() -> None:
    answer, _, seconds = probed([[7] * 9, [7] * 9, [8] * 9], stable=3, warmup=2, patience=9)
    assert (answer.answer, answer.stopped, answer.details["probes"]) == ("7", "confident", 4)
    # Probes 2, 3 and 4 count; each sample has written four parts and answered four probes.
    assert answer.summary["tokens_total"] == 3 * 4 * (PART + SAID)
    assert answer.details["shares"] == {"7": 2 / 3, "8": 1 / 3}
    # A part waits for the probes before it.
    assert seconds == 4 * (PART + SAID) == answer.summary["tokens_critical"]


def test_a_probe_is_dropped_from_the_text() -> None:
    _, run, _ = probed([[7] * 9], stable=2, warmup=2)
    chats = {name: node.request.messages[-1].text for name, node in run.graph.nodes.items() if "#0" in name}
    assert "boxed{" in chats["probe/1#0"] and "boxed{" not in chats["grow/2#0"]
    assert chats["probe/1#0"].startswith(chats["grow/1#0"])


def test_a_change_of_the_leading_answer_begins_anew() -> None:
    answer, _, _ = probed([[7, 7, 8, 8, 8, 8]] * 3, stable=3, warmup=1)
    assert (answer.answer, answer.details["probes"]) == ("8", 5)


def test_samples_that_disagree_for_long_are_cut_and_do_not_vote() -> None:
    answer, run, _ = probed(
        [[7] * 9, [7] * 9, [9, 9, 9, 9], [8, 7, 8, 7, 8, 7, 8, 7, 8]], patience=2, warmup=1, stable=5
    )
    assert answer.details["cut"] == [2]
    assert [name for name in run.graph.nodes if name.startswith("grow") and name.endswith("#2")] == [
        "grow/0#2",
        "grow/1#2",
    ]
    # The one that comes back is not cut: it has disagreed once at a time.
    assert answer.details["shares"] == {"7": 2 / 3, "8": 1 / 3} and answer.details["votes"] == 3


def test_samples_that_have_ended_keep_their_votes() -> None:
    answer, _, _ = probed([[5], [5], [7] * 9], stable=2, warmup=1, patience=9)
    assert (answer.answer, answer.stopped, answer.details["votes"]) == ("5", "confident", 3)


def test_where_nothing_is_stable_all_samples_end_and_vote() -> None:
    paths = [[1, 2, 3, 7], [4, 5, 6, 7], [8, 9, 10, 11]]
    answer, _, _ = probed(paths, stable=9, patience=9)
    assert (answer.answer, answer.stopped, answer.details["cut"]) == ("7", "done", [])
    assert answer.details["shares"] == {"7": 2 / 3, "11": 1 / 3}


def test_a_sample_that_runs_out_of_tokens_has_no_vote() -> None:
    answer, _, _ = probed([[7] * 20, [8, 8]], stable=30, patience=30, parameters=Parameters(max_tokens=35))
    assert (answer.answer, answer.details["spoilt"]) == ("8", 1)


def test_a_budget_ends_it_with_what_was_said() -> None:
    answer, _, _ = probed([[7] * 9, [7] * 9], stable=5, budget=Budget(tokens=60))
    assert (answer.answer, answer.stopped) == ("7", "budget")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"interval": 100}, "interval=100 of max_tokens=100; ask samples before they end"),
        ({"probe": ""}, "use a text that asks for the answer"),
        ({"stable": 0}, "stable=0"),
    ],
)
def test_refusals(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        probed([[7]], **knobs)
