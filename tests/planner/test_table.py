"""The plans of docs/your-cards.md are what the planner says today."""

from __future__ import annotations

import json
import shlex

import pytest

from partsong.cli import parse
from partsong.planner import machine_named
from tests import covering
from tests.planner import table


def test_the_page_shows_every_plan() -> None:
    cells = json.loads(table.PLANNED.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page(cells)
    shown = table.FRONT.read_text(encoding="utf-8")
    assert shown == table.front(shown, cells)
    assert set(cells) == {f"{name}, {title}" for name in table.MODELS for title in table.MACHINES}


def test_sections_ask_for_the_machine_that_they_plan() -> None:
    for machine, asked in table.MACHINES.values():
        options = parse(["plan", *shlex.split(asked)])
        given = machine_named(options.gpus, options.link, per_node=options.per_node, across=options.across)
        assert given == machine


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "z-image-turbo" else pytest.mark.full) for name in table.MODELS]
)
def test_plans_are_current(model: str) -> None:
    titles = tuple(table.MACHINES) if covering.FULL else ("Two RTX 4090",)
    cells = json.loads(table.PLANNED.read_text(encoding="utf-8"))
    for key, cell in table.plans((model,), titles):
        assert cells[key] == cell
