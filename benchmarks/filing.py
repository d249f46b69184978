"""Writes the result files of benchmarks: NAME.json with everything that was measured, NAME.md with a table of it."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partsong.jobs.machine import describe_hardware


def file_result(out: Path, script: str, rows: Sequence[dict[str, Any]], title: str, note: str, table: str) -> None:
    """Writes both files and prints the second.

    Args:
        out: path of both files without suffix.
        script: path of the benchmark, as its command names it.
        rows: what was measured.
        title: heading of the page; the date is added.
        note: a few sentences on what was measured and how.
        table: the rows as a Markdown table.
    """
    hardware = describe_hardware()
    command, date = " ".join(["python", script, *sys.argv[1:]]), datetime.date.today().isoformat()
    result = {"command": command, "date": date, "hardware": hardware, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    packages = ", ".join(f"{name} {version}" for name, version in hardware["packages"].items())
    cores = f"{hardware['cores']} cores with {hardware['instruction_set']}"
    where = f"`{command}`; {cores}, {hardware['system']}; packages: {packages}"
    page = "\n".join([f"# {title}, {date}", "", where, "", note, "", table]) + "\n"
    out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])
