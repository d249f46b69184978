"""Whole runs with drafts: the same answer and the same bill but for the guesses, also from a journal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.reasoning import Answer, Budget, Journal, Parameters, Run, parse_thinking
from partsong.reasoning.local import LocalEngine
from partsong_zoo.sums import answer_of, examples

QUESTION = examples(1, 4, ["sum"])[0].question
EVERY_GUESS = {1: 1.0, 512: 1.0}


def think(how: str, journal: Path | None = None, budget: Budget | None = None, **more: Any) -> Answer:
    async def main() -> Answer:
        engine = LocalEngine("sums", dtype=torch.float64, **more)
        kept = None if journal is None else Journal(journal)
        run = Run(engine, seed=3, journal=kept, budget=budget or Budget())
        thinking = parse_thinking(how)
        try:
            return await thinking(run, QUESTION, extract=answer_of, parameters=Parameters(max_tokens=40))
        finally:
            if kept is not None:
                kept.close()
            await engine.close()

    return asyncio.run(main())


def bill(answer: Answer) -> dict[str, Any]:
    ours = ("tokens_drafted", "tokens_rejected", "seconds", "prefill_cached")
    return {name: value for name, value in answer.summary.items() if name not in ours}


@pytest.mark.parametrize(
    "how",
    [
        "pdr:schedule=3-1",
        *(
            pytest.param(how, marks=pytest.mark.full)
            for how in ("self-consistency:num=4", "sequential-refinement:rounds=2")
        ),
    ],
)
def test_thinking_comes_to_the_same_answer_at_the_same_cost(how: str) -> None:
    plain, fast = think(how), think(how, speculate=["ngram", "jacobi"], step_costs=EVERY_GUESS)
    assert (fast.text, fast.answer) == (plain.text, plain.answer)
    assert bill(fast) == bill(plain)
    assert plain.summary["tokens_drafted"] == 0
    assert fast.summary["tokens_drafted"] > fast.summary["tokens_rejected"] > 0


@pytest.mark.full
def test_a_journal_that_was_begun_without_drafts_goes_on_with_them(tmp_path: Path) -> None:
    begun = think("self-consistency:num=2", tmp_path / "j.sqlite")
    more = think("self-consistency:num=5", tmp_path / "j.sqlite", speculate="ngram", step_costs=EVERY_GUESS)
    alone = think("self-consistency:num=5")
    assert (more.text, more.answer) == (alone.text, alone.answer) and bill(more) == bill(alone)
    assert begun.summary["calls"] == 2
    again = think("self-consistency:num=5", tmp_path / "j.sqlite")
    assert again.summary["tokens_drafted"] == more.summary["tokens_drafted"] > 0


def test_a_budget_of_tokens_ends_a_run_with_drafts_too() -> None:
    budget = Budget(tokens=60)
    plain = think("self-consistency:num=6", budget=budget)
    fast = think("self-consistency:num=6", budget=Budget(tokens=60), speculate="ngram", step_costs=EVERY_GUESS)
    assert plain.stopped == fast.stopped == "budget"
    # Calls are cut while a step is under way, in which six rows write up to seventeen tokens each.
    assert 60 <= fast.summary["tokens_total"] <= plain.summary["tokens_total"] + 6 * 17
