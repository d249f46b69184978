"""Runs: what a call depends on, budgets, cancelling, journals, replays, kills."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError, OutputError
from partsong.reasoning import (
    Answer,
    Budget,
    BudgetError,
    Journal,
    Line,
    Message,
    Parameters,
    Price,
    Run,
    ScriptedEngine,
    final_number,
    pdr,
    self_consistency,
)
from partsong.reasoning.calls.graph import CallNode
from partsong.reasoning.calls.virtual_time import run_virtual
from tests import covering
from tests.reasoning.scripts import guesses

ASK = [Message("user", ("what is it",))]


def engine(right: float = 0.6, **more: Any) -> ScriptedEngine:
    return ScriptedEngine(guesses(right), seconds_per_token=0.02, seconds_to_first=0.1, **more)


async def gathered(run: Run, num: int) -> list[str]:
    texts: dict[int, str] = {}
    async with run.samples(ASK, num, path=("s",)) as samples:
        async for number, completion in samples:
            texts[number] = completion.text
    return [texts[number] for number in sorted(texts)]


def test_samples_do_not_depend_on_how_many_there_are_or_how_many_run_at_once() -> None:
    many, _ = run_virtual(gathered(Run(engine(), seed=5), 64))
    few, _ = run_virtual(gathered(Run(engine(), seed=5, concurrency=3), 8))
    assert few == many[:8]
    assert len(set(many)) > 1
    assert run_virtual(gathered(Run(engine(), seed=6), 8))[0] != few


@pytest.mark.parametrize("right", [0.5, 0.9])
def test_stopping_early_changes_tokens_and_not_the_answer(right: float) -> None:
    saved = 0.0
    for seed in range(20):
        whole, _ = run_virtual(
            self_consistency(Run(engine(right), seed=seed), "q", extract=final_number, num=16, early_stop=False)
        )
        early, _ = run_virtual(self_consistency(Run(engine(right), seed=seed), "q", extract=final_number, num=16))
        assert early.answer == whole.answer
        assert early.calls == whole.calls or early.answer == whole.answer
        assert early.summary["tokens_total"] <= whole.summary["tokens_total"]
        assert early.summary["tokens_critical"] <= whole.summary["tokens_critical"]
        if early.stopped == "decided":
            assert early.summary["tokens_cancelled"] > 0
        saved += 1 - early.summary["tokens_critical"] / whole.summary["tokens_critical"]
    assert saved / 20 > (0.1 if right < 0.9 else 0.3)


def test_a_sample_that_ran_out_of_tokens_has_no_vote() -> None:
    answer, _ = run_virtual(
        self_consistency(
            Run(engine()), "q", extract=final_number, num=6, parameters=Parameters(max_tokens=3), early_stop=False
        )
    )
    assert answer.answer is None
    assert (answer.details["spoilt"], answer.summary["truncated"]) == (6, 6)
    assert "named no answer" in answer.details["hint"]


def test_budgets_end_calls_under_way() -> None:
    async def spent(budget: Budget) -> tuple[Answer, Run]:
        run = Run(engine(chunk=1), budget=budget)
        return await self_consistency(run, "q", extract=final_number, num=12, early_stop=False), run

    (answer, run), _ = run_virtual(spent(Budget(tokens=200)))
    assert answer.stopped == "budget"
    assert 200 <= answer.summary["tokens_total"] <= 212  # each of 12 writes one token at a time
    assert "of 200 tokens" in str(answer.summary["stopped"])
    (answer, _), _ = run_virtual(spent(Budget(calls=5)))
    assert (answer.stopped, answer.details["votes"]) == ("budget", 5)
    (answer, _), _ = run_virtual(spent(Budget(money=150e-6, price=Price(completion=1.0))))
    assert answer.stopped == "budget" and answer.summary["tokens_total"] < 170
    assert run.spending.tokens >= 150


@pytest.mark.parametrize("budget", [Budget(tokens=150), Budget(calls=5), Budget(seconds=0.5)], ids=str)
def test_a_run_its_budget_ended_is_replayed_as_it_was(tmp_path: Path, budget: Budget) -> None:
    async def vote(journal: Journal, budget: Budget | None = None) -> tuple[Answer, int]:
        run = Run(engine(chunk=1), budget=budget, journal=journal, concurrency=4)
        return await self_consistency(run, "q", extract=final_number, num=12, early_stop=False), run.replayed

    with Journal(tmp_path / "j.db") as journal:
        (first, _), _ = run_virtual(vote(journal, budget))
    assert first.stopped == "budget"
    with Journal(tmp_path / "j.db", replay=True) as journal:
        (again, _), _ = run_virtual(vote(journal))
    assert again == first
    # With the same budget it stays where it is; with more it goes on.
    with Journal(tmp_path / "j.db") as journal:
        kept = journal.completed
        (same, replayed), _ = run_virtual(vote(journal, budget))
        assert (same.details, same.answer, replayed) == (first.details, first.answer, kept)
        (whole, replayed), _ = run_virtual(vote(journal))
        assert (whole.stopped, whole.details["votes"], replayed) == ("done", 12, kept)


def test_a_call_can_be_halted_when_enough_was_read(tmp_path: Path) -> None:
    line = Line(text="a b c d e f", confidence=(3.0, 3.0, 1.0, 0.5, 3.0, 3.0))
    scripted = ScriptedEngine(lambda request, draw: line, chunk=1, seconds_per_token=1.0)

    async def halted(journal: Journal) -> tuple[Any, Any]:
        run = Run(scripted, journal=journal)
        parameters = Parameters(logprobs=5)
        completion = await run.call(
            ASK, path=("a",), parameters=parameters, halt=lambda so_far: sum(so_far.confidence[-2:]) < 2.0
        )
        return completion, run.summary([])

    with Journal(tmp_path / "j.db") as journal:
        (completion, summary), seconds = run_virtual(halted(journal))
        assert (completion.text, completion.finish) == ("a b c d", "halted")
        assert completion.confidence == (3.0, 3.0, 1.0, 0.5)
        assert (summary["tokens_total"], summary["tokens_cancelled"], seconds) == (4, 4, 4.0)
        # It is as complete as any other, so it is not made again.
        assert run_virtual(halted(journal))[0] == (completion, summary)
    assert len(scripted.asked) == 1


def test_a_call_nobody_asks_for_again_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """A run that asks for other calls than before, as with servers that draw again."""

    async def ask(journal: Journal, *paths: str) -> tuple[int, list[str]]:
        run = Run(engine(), journal=journal)
        completions = await asyncio.gather(*(run.call(ASK, path=(path,)) for path in paths))
        return run.replayed, [one.source for one in completions]

    with Journal(tmp_path / "j.db") as journal:
        for path in ("a", "b", "c"):
            run_virtual(ask(journal, path))
    with Journal(tmp_path / "j.db") as journal:
        result, seconds = run_virtual(ask(journal, "c", "b"))
    assert result == (2, ["c#0", "b#0"]) and seconds == 10.0


def test_a_call_that_failed_has_ended() -> None:
    seen: list[bool] = []
    scripted = ScriptedEngine(lambda request, draw: Line(text="", error=ValueError("away")), seconds_to_first=1.0)
    run = Run(scripted, observer=lambda node, text: seen.append(node.end is not None))
    with pytest.raises(ValueError, match="away"):
        run_virtual(run.call(ASK, path=("a",)))
    assert seen == [False, True] and run.graph.nodes["a#0"].end == 1.0


def test_an_observer_sees_calls_grow() -> None:
    seen: list[tuple[str, int, str, bool]] = []

    def watch(node: CallNode, text: str) -> None:
        seen.append((node.name, node.written, text, node.end is not None))

    scripted = ScriptedEngine(lambda request, draw: Line(text="so it is 7"), chunk=2)
    run_virtual(Run(scripted, observer=watch).call(ASK, path=("a",)))
    assert seen == [
        ("a#0", 0, "", False),
        ("a#0", 2, "so it", False),
        ("a#0", 4, " is 7", False),
        ("a#0", 4, "", True),
    ]


def test_a_budget_that_is_spent_says_so() -> None:
    async def second() -> None:
        run = Run(engine(), budget=Budget(calls=1))
        await run.call(ASK, path=("a",))
        await run.call(ASK, path=("b",))

    with pytest.raises(BudgetError, match="1 of 1 calls"):
        run_virtual(second())
    with pytest.raises(ArgumentError, match="needs a price"):
        Budget(money=1.0).validate()
    with pytest.raises(ArgumentError, match="tokens=0"):
        Run(engine(), budget=Budget(tokens=0))


def test_an_error_of_the_engine_is_the_callers_and_nothing_else_is_lost(tmp_path: Path) -> None:
    def script(request: Any, draw: random.Random) -> Line:
        return Line(text="ok", error=ValueError("away") if request.path == ("b",) else None)

    async def both(journal: Journal) -> None:
        run = Run(ScriptedEngine(script), journal=journal)
        await run.call(ASK, path=("a",))
        await run.call(ASK, path=("b",))

    with Journal(tmp_path / "j.db") as journal:
        with pytest.raises(ValueError, match="away"):
            asyncio.run(both(journal))
        assert journal.completed == 1


async def drafted(right: float, journal: Journal | None, scripted: ScriptedEngine | None = None) -> Answer:
    run = Run(scripted or engine(right), seed=3, journal=journal)
    return await pdr(run, "what is it", extract=final_number, schedule=(4, 2, 1))


@pytest.mark.parametrize("strategy", ["pdr", "vote"])
def test_a_replay_is_the_run(tmp_path: Path, strategy: str) -> None:
    """Without an engine, and with the same early stop: calls end in the order in which they did."""

    def record(journal: Journal, scripted: ScriptedEngine) -> dict[str, Any]:
        if strategy == "pdr":
            answer, _ = run_virtual(drafted(0.6, journal, scripted))
        else:
            run = Run(scripted, seed=4, journal=journal)
            answer, _ = run_virtual(self_consistency(run, "q", extract=final_number, num=16))
        facts = {"answer": answer.answer, "text": answer.text, "calls": answer.calls, "stopped": answer.stopped}
        return {**facts, **answer.summary}

    with Journal(tmp_path / "j.db") as journal:
        first = record(journal, engine())
    silent = engine()
    with Journal(tmp_path / "j.db", replay=True) as journal:
        assert json.dumps(record(journal, silent)) == json.dumps(first)
    assert silent.asked == []


async def _early(journal: Journal, budget: Budget | None = None) -> tuple[Answer, int]:
    run = Run(engine(chunk=1), seed=4, journal=journal, budget=budget)
    answer = await self_consistency(run, "q", extract=final_number, num=16)
    return answer, run.spending.tokens


def test_a_finished_run_with_an_early_stop_keeps_its_bill(tmp_path: Path) -> None:
    """Run again, it makes no call; the tokens of the calls that it cancelled the first time stay on the bill."""
    bills = []
    for replay in (False, False, True):
        with Journal(tmp_path / "j.db", replay=replay) as journal:
            (answer, _), _ = run_virtual(_early(journal))
            bills.append({key: answer.summary[key] for key in ("tokens_total", "tokens_cancelled", "tokens_accepted")})
    assert bills[0]["tokens_cancelled"] > 0
    assert bills == [bills[0]] * 3


def test_a_resumed_budget_counts_cancelled_tokens_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.db") as journal:
        (first, spent), _ = run_virtual(_early(journal))
        assert spent == first.summary["tokens_total"]
        for _ in range(2):
            (again, spent), _ = run_virtual(_early(journal, Budget(tokens=10_000)))
            assert spent == again.summary["tokens_total"] == first.summary["tokens_total"]


def test_a_call_made_again_carries_what_was_cut_off(tmp_path: Path) -> None:
    async def one(journal: Journal, seconds: float | None) -> Any:
        budget = None if seconds is None else Budget(seconds=seconds)
        run = Run(
            ScriptedEngine(lambda *_: Line(text="a b c d"), chunk=1, seconds_per_token=1.0),
            journal=journal,
            budget=budget,
        )
        return (await run.call(ASK, path=("a",))).usage

    with Journal(tmp_path / "j.db") as journal:
        with pytest.raises(BudgetError):
            run_virtual(one(journal, 2.5))
        usage, _ = run_virtual(one(journal, None))
    assert (usage.completion, usage.wasted) == (4, 2)


def test_a_replay_of_something_else_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.db") as journal:
        run_virtual(Run(engine(), journal=journal).call(ASK, path=("a",)))
    with (
        Journal(tmp_path / "j.db", replay=True) as journal,
        pytest.raises(ArgumentError, match="does not hold call b#0"),
    ):
        run_virtual(Run(engine(), journal=journal).call(ASK, path=("b",)))
    with pytest.raises(ArgumentError, match="nothing to replay"):
        Journal(tmp_path / "none.db", replay=True)
    (tmp_path / "odd.db").write_text("something else, and longer than a header would be" * 20)
    with pytest.raises(ArgumentError, match="is not a journal"):
        Journal(tmp_path / "odd.db")
    with pytest.raises(OutputError, match="cannot be opened"):
        Journal("/proc/nowhere/j.db")


KILLED = """
import asyncio, sys
from pathlib import Path
from partsong.reasoning import Journal, Run, ScriptedEngine, final_number, pdr
from tests.reasoning.scripts import guesses

async def main():
    engine = ScriptedEngine(guesses(0.6), seconds_per_token=0.006)
    with Journal(Path(sys.argv[1])) as journal:
        run = Run(engine, seed=3, journal=journal)
        print("begun", flush=True)
        answer = await pdr(run, "what is it", extract=final_number, schedule=(6, 3, 1))
        print(len(engine.asked), run.replayed, answer.answer, answer.summary["tokens_total"], flush=True)

asyncio.run(main())
"""


def test_killed_runs_go_on_and_repeat_nothing(tmp_path: Path) -> None:
    draw = random.Random(0)
    whole = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "whole.db")], capture_output=True, text=True)
    asked, _, answer, tokens = whole.stdout.split()[1:]
    for trial in range(4 if covering.FULL else 1):
        path, rounds = tmp_path / f"{trial}.db", 0
        while True:
            child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None and child.stdout.readline() == "begun\n"
            if rounds < (2 if covering.FULL else 1):
                with pytest.raises(subprocess.TimeoutExpired):
                    child.wait(draw.uniform(0.02, 0.15))
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                rounds += 1
                with Journal(path) as journal:
                    kept = journal.completed
                continue
            again, replayed, last, spent = child.stdout.read().split()
            child.wait()
            break
        assert (last, spent) == (answer, tokens)
        assert int(replayed) == kept and int(again) == int(asked) - kept


def test_a_thousand_streams_cost_little() -> None:
    async def many() -> float:
        run = Run(ScriptedEngine(lambda request, draw: Line(text="1")), concurrency=1000)
        start = time.process_time()
        async with run.samples(ASK, 1000, path=("s",)) as samples:
            async for _ in samples:
                pass
        return time.process_time() - start

    # The least of three: processor seconds grow, too, while others fill the caches.
    assert min(asyncio.run(many()) for _ in range(3)) < 1.0
