"""Asks pip whether partsong installs beside other tools: ``python benchmarks/neighbours.py``.

Each tool is resolved together with this checkout and nothing is installed. The table has the versions that pip takes,
and the seconds that it needs, most of which are reading an index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path

ROOT = Path(__file__).resolve().parent.parent
#: Packages whose bounds have shut tools out.
SHOWN = ("torch", "diffusers", "transformers", "accelerate", "numpy", "openai", "fastapi")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to resolve."""

    out: Path = result_path(__file__)
    """Path of both files without suffix."""
    tools: list[str] = field(default_factory=lambda: ["vllm-omni==0.30.0", "optillm==0.4.0", "cache-dit==1.5.3"])
    """Requirements, each resolved beside partsong alone."""


def main(config: Config) -> None:
    """Resolves each and writes the files."""
    rows = [_resolved(tool) for tool in config.tools]
    table = markdown_table(
        ("beside", "packages", *SHOWN, "seconds"),
        [
            (row["tool"], row["packages"], *(row["versions"].get(name, "") for name in SHOWN), f"{row['seconds']:.0f}")
            for row in rows
        ],
    )
    note = "`pip install --dry-run . TOOL` in an empty environment: the versions that pip takes for both."
    file_result(config.out, __file__, rows, "What resolves beside partsong", note, table)


def _resolved(tool: str) -> dict[str, Any]:
    """Returns what pip takes for partsong and a tool.

    Raises:
        CalledProcessError: pip finds no versions that fit both.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        report = Path(folder, "report.json")
        began = time.monotonic()
        pip = [str(Path(folder, "bin", "python")), "-m", "pip", "install", "--quiet", "--dry-run"]
        subprocess.run([*pip, "--report", str(report), str(ROOT), tool], check=True)
        taken = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    versions = {each["name"].lower(): each["version"] for each in taken}
    return {"tool": tool, "packages": len(taken), "versions": versions, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main(tyro.cli(Config))
