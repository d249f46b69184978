"""docs/plans.md is what the planner says today."""

from __future__ import annotations

import itertools
import json

import pytest

from tests import covering
from tests.planner import table


def test_the_page_shows_every_plan() -> None:
    cells = json.loads(table.PLANNED.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page(cells)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "z-image-turbo" else pytest.mark.full) for name in table.MODELS]
)
def test_plans_are_current(model: str) -> None:
    devices = tuple(table.DEVICES) if covering.FULL else ("h100", "4090")
    cells = json.loads(table.PLANNED.read_text(encoding="utf-8"))
    # Two ranks come first.
    for key, cell in itertools.islice(table.plans((model,), devices), None if covering.FULL else len(devices)):
        assert cells[key] == cell
