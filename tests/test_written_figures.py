"""Tables that people wrote into pages and cards hold the figures of the files they name."""

from __future__ import annotations

import pytest

from tests.documents import ROOT
from tests.results_files import filed


def percentages(file: str, key: str) -> set[str]:
    return {f"{100 * row[key]:.1f}" for row in filed(file)["rows"]}


@pytest.mark.parametrize(
    ("page", "file", "key"),
    [
        ("zoo/partsong_zoo/weights/shapes-few/README.md", "steps/2026-11-26-few-steps", "facts_read"),
        ("docs/thinking-eval.md", "thinking/2026-11-26-zoo-sums", "accuracy"),
    ],
)
def test_a_page_has_every_share_of_its_file(page: str, file: str, key: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"benchmarks/results/{file}.md" in text
    cells = {
        cell.split()[0]
        for line in text.splitlines()
        if line.startswith("|")
        for cell in line.split("|")
        if cell.strip()
    }
    assert not percentages(file, key) - cells
