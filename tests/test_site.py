"""The documentation becomes a site without a warning, and llms.txt lists its pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.serving.browser import chromium, lacking


def test_the_site_lists_every_page() -> None:
    listed = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README", "index"}
    assert not pages - {*listed}


def test_there_are_few_pages() -> None:
    """Beside a page for each method; who adds one merges two others."""
    assert len(list((ROOT / "docs").glob("*.md"))) <= 26


@pytest.mark.full
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="sphinx is not installed: make docs brings it")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert built.returncode == 0, built.stderr[-3000:]
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", listed)
    assert len(targets) > 30 and not [target for target in targets if not (site / target).is_file()]
    assert listed.startswith("# partsong\n\n> ")
    assert "partsong.Ring" in (site / "_generated" / "api" / "partsong.html").read_text(encoding="utf-8")
    if lacking() is None:
        find_models(site)


def find_models(site: Path) -> None:
    """The field above the matrix leaves the rows that have what is typed, on a phone whose page is not too wide."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        for name in ("index", "support"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for typed, model in {"black-forest-labs/flux.1": "FluxTransformer2DModel", "wan vace": "WanVACE"}.items():
            page.fill(".finder", typed)
            shown = page.locator("#matrix tbody tr:visible").all_inner_texts()
            assert len(shown) == 2 and model in shown[1], "the row of classes, and one of models"
        page.fill(".finder", "no such model")
        assert page.locator("#matrix tbody tr:visible").count() == 1
        assert page.get_by_text("No row has that in its name").is_visible()
