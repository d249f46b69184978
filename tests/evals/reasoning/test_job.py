"""An evaluation as the command line asks for it: many problems at once, never more calls than were asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from partsong.evals.reasoning.job import ReasoningJob, run_reasoning
from tests.evals.reasoning.pools import DRAWN, problems, script
from tests.reasoning.counting import Counting

STRATEGIES = ("self-consistency:num=6,early_stop=false", "pdr:schedule=4-1,workspace_tokens=50")


def run(engine: Counting, **options: Any) -> dict[str, list[dict[str, Any]]]:
    job = ReasoningJob(problems=problems(12), strategies=STRATEGIES, parameters=DRAWN, seed=2, **options)
    return asyncio.run(run_reasoning(job, engine))


@pytest.mark.parametrize(
    ("concurrency", "together", "samples"),
    [  # by default live ones and pools take turns
        pytest.param(*sizes, samples, marks=[pytest.mark.full] * ((row + column) % 2))
        for row, sizes in enumerate([(1, 8), (5, 8), (5, 3), (64, 12)])
        for column, samples in enumerate([None, 6])
    ],
)
def test_calls_of_all_problems_are_bounded_together(concurrency: int, together: int, samples: int | None) -> None:
    engine = Counting(script)
    found = run(engine, concurrency=concurrency, together=together, samples=samples)
    # Problems under way could ask for 6 at once.
    assert engine.most == min(concurrency, 6 * together)
    assert engine.under_way == 0

    def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]

    alone = run(Counting(script), concurrency=1, together=1, samples=samples)
    assert kept(found["rows"]) == kept(alone["rows"]) and found["differences"] == alone["differences"]
