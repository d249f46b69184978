"""The support page is what the code says; what it refuses is refused, what it promises is in the matrix.

``python -m tests.parallel.test_support`` writes the page anew.
"""

from __future__ import annotations

from pathlib import Path

from partsong.parallel import ADAPTERS
from partsong.parallel.ranks.launch import launch
from partsong.samplers.registry import strategies
from partsong.samplers.support import support_rows, support_table
from tests.parallel import support_worker
from tests.parallel.equivalence_worker import compared

DENOISING = {name: kind for name, kind in strategies().items() if kind.denoises}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == support_table(), "run python -m tests.parallel.test_support"


def test_every_promise_is_in_the_matrix() -> None:
    promised = {
        (name, row["model"])
        for row in support_rows()
        for name, kind in DENOISING.items()
        if row.get(kind.__name__, "refused") != "refused"
    }
    tested = compared() | support_worker.TESTED_ELSEWHERE
    assert promised <= tested, sorted(promised - tested)
    assert len(promised) > 0.5 * len(ADAPTERS) * len(DENOISING)


def test_refused_cells_raise_with_their_reason() -> None:
    for (strategy, model), told in launch(support_worker.refusals, 2).items():
        reason = strategies()[strategy]().refuses(ADAPTERS[model])
        assert reason is not None
        assert told == [f"UnsupportedError: {strategies()[strategy].__name__} on {model}: {reason}"] * 2


if __name__ == "__main__":
    PAGE.write_text(support_table(), encoding="utf-8")
