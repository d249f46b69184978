"""The script that follows README.md: what it reads from a page, and what it notes of each step."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.documents import ROOT

PAGE = """# A page

```
echo first \\
    line
echo wrong >&2; exit 3   # a comment
```

```python
print(" 50%|#####     | 1/2 [00:00<00:00]\\r", 6 * 7)
```

```text
not a command
```

```bash
partsong serve --model shapes   # a server
partsong list models
```
"""


@pytest.fixture
def newcomer() -> ModuleType:
    return importlib.import_module("benchmarks.startup.newcomer")


def test_steps_of_a_page(newcomer: ModuleType) -> None:
    steps = newcomer.steps_of(PAGE)
    assert [step.kind for step in steps] == ["command", "command", "python", "command", "server", "request", "command"]
    assert steps[0].text.split() == ["echo", "first", "line"]
    assert steps[2].text.startswith("print(")
    assert steps[3].text == "pip install '.[serve]'" and steps[4].text.endswith("# a server")


def test_steps_of_readme(newcomer: ModuleType) -> None:
    """README has all that a newcomer needs, and what it needs extras for is in its table of extras."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = newcomer.steps_of(readme)
    texts = [step.text for step in steps]
    wanted = [
        "pip install .",
        "make demo",
        "Z-Image",
        "partsong image",
        "lists-mdlm",
        "partsong think",
        "partsong plan",
    ]
    places = [next(place for place, text in enumerate(texts) if each in text) for each in wanted]
    assert places == sorted(places)
    assert [step.kind for step in steps].count("python") == 2
    assert [step.kind for step in steps][-2:] == ["server", "request"]
    assert "| `serve` | the HTTP server |" in readme
    assert all(any(part in text for text in texts) for part in newcomer.NOT_RUN)


def test_rows_of_what_was_run(newcomer: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    config = newcomer.Config(
        out=tmp_path / "log", readme=page, environment=Path(sys.prefix), only=["echo", "print", "POST"]
    )
    rows = list(newcomer.follow(config, tmp_path))
    assert [row["code"] for row in rows] == [0, 3, 0, None, None, None, None]
    assert [row["printed"] for row in rows[:3]] == [["first line"], ["wrong"], [" 42"]]
    assert rows[5]["not_run"] == "no server runs" and rows[6]["not_run"] == "not asked for"
    assert all(row["seconds"] >= 0 for row in rows[:3])
    assert newcomer._table(rows).count("\n") == len(rows) + 1
