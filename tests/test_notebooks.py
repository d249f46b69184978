"""The notebooks run from the first cell to the last, and print what they show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.documents import LINK, ROOT
from tests.notebooks import NOTEBOOKS, run_cells

#: What depends on the machine's rounding: how far an approximate picture is from the serial one.
LOOSE = re.compile(r"DisplacedPatch: \d+ of 255")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.full
def test_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    shown = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in code_cells(notebook)]
    printed = run_cells(notebook, tmp_path)
    assert [LOOSE.sub("", text) for text in printed] == [LOOSE.sub("", text) for text in shown], (
        "python -m tests.notebooks"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    targets = [target for cell in cells for target in LINK.findall("".join(cell["source"]))]
    assert not [target for target in targets if "://" not in target and not (path.parent / target).exists()]


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
