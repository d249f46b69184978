"""Writes the result files of benchmarks: a .json with everything that was measured, a .md with a table of it.

benchmarks/README.md says where they go and what they hold. Both record the load of other programs, before the
benchmark and while it ran: importing this starts the watch.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partsong.jobs.load import DISTURBED, LoadWatch, spread
from partsong.jobs.machine import describe_hardware

__all__ = ["file_result", "markdown_table", "result_path", "spread"]

HERE = Path(__file__).resolve().parent

_WATCH = LoadWatch()


def result_path(script: str, what: str = "") -> Path:
    """Returns where a result of today goes, without suffix: results/TOPIC/DATE-SCRIPT-WHAT.

    The topic is the folder of the script, or its own name if it has none; words of the topic are not repeated.

    Args:
        script: the benchmark, as its ``__file__``.
        what: what tells this result from others of the script.
    """
    topic, *_ = Path(script).resolve().relative_to(HERE).with_suffix("").parts
    words = [word for word in Path(script).stem.split("_") if word not in topic.split("_")]
    name = "-".join([datetime.date.today().isoformat(), *words, *filter(None, [what])])
    return HERE / "results" / topic.replace("_", "-") / name


def file_result(
    out: Path,
    script: str,
    rows: Sequence[dict[str, Any]],
    title: str,
    note: str,
    table: str,
    *,
    spreads: Mapping[str, float] = MappingProxyType({}),
    load: Mapping[str, float] | None = None,
) -> None:
    """Writes both files and prints the second.

    Args:
        out: path of both files without suffix.
        script: the benchmark, as its ``__file__``.
        rows: the measurements.
        title: heading of the page; the date is added.
        note: a few sentences on what was measured and how.
        table: the rows as a Markdown table.
        spreads: by name how much the times of rows vary that others are compared with (`spread`).
        load: what `LoadWatch.report` said in the process that measured, where that is not this one or a child of it.
    """
    hardware = describe_hardware()
    script = Path(script).resolve().relative_to(HERE.parent).as_posix()
    command, date = " ".join(["python", script, *sys.argv[1:]]), datetime.date.today().isoformat()
    load = _WATCH.report() if load is None else load
    result = {"command": command, "date": date, "hardware": hardware, **load, "spreads": dict(spreads), "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    packages = ", ".join(f"{name} {version}" for name, version in hardware["packages"].items())
    cores = f"{hardware['cores']} cores with {hardware['instruction_set']}"
    where = f"`{command}`; {cores}, {hardware['system']}; packages: {packages}"
    page = "\n".join([f"# {title}, {date}", "", where, "", note, "", _quiet(load, spreads), "", table]) + "\n"
    out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def _quiet(load: Mapping[str, float], spreads: Mapping[str, float]) -> str:
    """Says whether anything disturbed the benchmark."""
    shares = (
        f"{load['load_before']:.0%} of the cores were busy before, {load['load_of_others']:.0%} with others meanwhile"
    )
    if spreads:
        name = max(spreads, key=spreads.__getitem__)
        shares += f"; the middle half of the times of {name} lie within {spreads[name]:.1%}"
    worst = max(*load.values(), *spreads.values())
    return f"Load: {shares}." if worst <= DISTURBED else f"**Disturbed**: {shares}. Read the ratios with care."


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])
