"""The pages of strategies: there is one for each, their examples say what they claim, their knobs exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from partsong.reasoning.strategies import STRATEGIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
OVERVIEW = DOCS / "thinking.md"
PAGES = [DOCS / "methods" / f"{name}.md" for name in STRATEGIES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_strategy_is_in_the_overview() -> None:
    linked = re.findall(r"^\| \[([\w-]+)\]\(methods/([\w-]+)\.md\)", OVERVIEW.read_text(encoding="utf-8"), re.MULTILINE)
    assert linked == [(name, name) for name in STRATEGIES]


@pytest.mark.parametrize("page", [OVERVIEW, *PAGES], ids=lambda page: page.stem)
def test_examples_say_what_they_claim(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        expected = block.rstrip().rsplit("  # ", 1)[1]
        exec(compile(block, str(page), "exec"), {"__name__": "page"})
        assert capsys.readouterr().out.strip() == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_knobs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = inspect.signature(STRATEGIES[page.stem]).parameters
    rows = re.findall(r"^\| `([\w, ]+)` \| ([^|]+) \|", text, re.MULTILINE)
    for names, _ in rows:
        assert set(names.split(", ")) <= set(known)
    signature = re.search(r"^`\w+\(([^`]*)\)`", text, re.MULTILINE)
    assert signature is not None
    for name, default in re.findall(r"(\w+)=(\([^)]*\)|[^,)]+)", signature.group(1)):
        shown = known[name].default
        assert default in (repr(shown), repr(shown).replace("'", '"'), "EASY_TO_HARD")
