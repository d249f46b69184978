"""Every filed result lies in the folder of its topic under its date, and says what made it."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.documents import LINK, ROOT, name
from tests.results_files import RESULTS
from tests.test_house import MAX_FILES

BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted(RESULTS.rglob("*.md"))
#: When pages began to say which instructions the processor has.
SAID_SINCE = datetime.date(2026, 11, 23)


def topics() -> set[str]:
    """The folders of scripts, and scripts that are a topic by themselves."""
    scripts = [path for path in BENCHMARKS.rglob("*.py") if "result_path(__file__" in path.read_text(encoding="utf-8")]
    parts = {path.relative_to(BENCHMARKS).with_suffix("").parts[0] for path in scripts}
    return {part.replace("_", "-") for part in parts}


def test_a_result_belongs_to_a_topic_with_scripts() -> None:
    by_command = {"kernels"}  # `partsong bench kernels`
    assert {path.parent.name for path in PAGES} == topics() | by_command


def test_no_folder_has_too_many_files() -> None:
    counts = Counter(path.parent for path in BENCHMARKS.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert max(counts.values()) <= MAX_FILES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_result_says_what_made_it(page: Path) -> None:
    date = datetime.date.fromisoformat(page.stem[:10])
    assert re.fullmatch(r"[\d-]{10}(-[a-z0-9]+)*", page.stem)
    result = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert result["command"] and result["hardware"]["cores"] and result["hardware"]["packages"] and result["rows"]
    assert date < SAID_SINCE or result["hardware"]["instruction_set"]
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"python (benchmarks/[\w/]+\.py)", text)
    assert all((ROOT / script).is_file() for script in scripts)
    assert all((page.parent / link).exists() for link in LINK.findall(text) if "://" not in link)


def test_a_script_files_its_result_by_topic_and_date() -> None:
    from benchmarks.filing import result_path

    today = datetime.date.today().isoformat()
    assert result_path(str(BENCHMARKS / "text" / "text_causal.py")) == RESULTS / "text" / f"{today}-causal"
    assert result_path(str(BENCHMARKS / "any_order.py")) == RESULTS / "any-order" / today
    assert result_path(str(BENCHMARKS / "parscale.py"), "cost") == RESULTS / "parscale" / f"{today}-cost"
