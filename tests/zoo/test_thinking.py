"""Strategies get what a zoo model was trained with, wherever they are named, and keep what the user has set."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from partsong.evals.reasoning.suite import read_strategies
from partsong.reasoning import Line, Run, ScriptedEngine
from partsong.zoo import MODELS, knobs_for, task_of
from partsong_zoo.sums.prompts import KNOBS


def prompts(text: str, model: str | None) -> list[str]:
    engine = ScriptedEngine(lambda request, draw: Line(text="answer: 7"))
    strategy: Any = read_strategies([text], model)[text]
    asyncio.run(strategy(Run(engine), "3+4=?", extract=lambda said: said.rpartition(": ")[2]))
    return [request.messages[-1].text for request in engine.asked]


def test_a_zoo_model_reads_its_own_language() -> None:
    text = "pdr:schedule=2-1"
    asked = prompts(text, "sums")
    assert asked == ["3+4=?", "3+4=?", "3+4=?\n\n1)answer: 7\n2)answer: 7"]
    for other in (None, "smollm2-135m", "lists-ar"):
        assert prompts(text, other) != asked


def test_what_the_user_set_stays() -> None:
    assert prompts("pdr:schedule=2-1,distillation=summary", "sums")[2].startswith("list:3+4=?")
    assert "distillation" not in knobs_for("sums", "pdr", ["distillation"])
    assert knobs_for("sums", "pdr") == KNOBS["pdr"]


@pytest.mark.parametrize("name", MODELS)
def test_models_that_think_say_how_answers_are_found(name: str) -> None:
    task = task_of(name)
    assert (task is not None) == (name in ("sums", "products"))
    assert task is None or task.answer_of("answer: 12") == "12"
