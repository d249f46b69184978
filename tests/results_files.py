"""Reads the result files of benchmarks/results/: their rows, and what their pages note."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.documents import ROOT

#: Where results are filed; their names begin with a topic.
RESULTS = ROOT / "benchmarks" / "results"
#: The largest part of the cores that others may have kept busy, before and meanwhile.
IDLE = 0.05
Row = Mapping[str, Any]


@cache
def filed(name: str) -> Mapping[str, Any]:
    """Returns a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def timed(name: str) -> list[Row]:
    """Returns the rows of a file of times; one from a busy machine fails."""
    file = filed(name)
    assert max(file["load_before"], file["load_of_others"]) < IDLE, f"{name} was not measured on an idle machine"
    return file["rows"]


def row(file: str, /, **fields: Any) -> Row:
    """Returns the one row of a file that has these values; none or several fail."""
    rows = [each for each in filed(file)["rows"] if all(each.get(key) == value for key, value in fields.items())]
    assert len(rows) == 1, f"{file} has {len(rows)} rows with {fields}"
    return rows[0]


def noted(name: str, pattern: str) -> tuple[str, ...]:
    """Returns the groups of a pattern that the page of a result has once: settings that rows do not repeat."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    matches = [match.groups() for match in re.finditer(pattern, text)]
    assert len(matches) == 1, f"{name} has {len(matches)} places with {pattern}"
    return matches[0]
