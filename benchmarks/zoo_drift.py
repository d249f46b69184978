"""Facts read and drift of the zoo's pictures under strategies.

``python benchmarks/zoo_drift.py --out benchmarks/NAME`` samples fresh captions serially and with each strategy, on each
number of ranks, and writes NAME.json and NAME.md.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from partsong.cli.info import env
from partsong.evals.zoo_drift import study
from partsong.parallel import DisplacedPatch, Ulysses


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to sample."""

    out: Path
    """Result files without suffix."""
    nproc: list[int] = field(default_factory=lambda: [2, 4])
    """Numbers of ranks."""
    captions: int = 100
    """Fresh captions."""
    seed: int = 0
    """Of captions and noise."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    cases = [(Ulysses(),), (DisplacedPatch(warmup_steps=2),), (DisplacedPatch(warmup_steps=2, order=0),)]
    rows: list[dict[str, Any]] = []
    for nproc in config.nproc:
        rows += study(cases, nproc=nproc, num_captions=config.captions, seed=config.seed)
    machine = env()
    result = {
        "command": " ".join(["python", "benchmarks/zoo_drift.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "hardware": {name: machine[name] for name in ("system", "cores", "gpus", "python", "packages")},
        "rows": rows,
    }
    config.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    config.out.with_suffix(".md").write_text(_markdown(result))
    print(_markdown(result))


def _markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Drift of the zoo's pictures, {result['date']}",
        "",
        f"`{result['command']}`; {result['hardware']['cores']} cores, {result['hardware']['system']}.",
        "",
        "The trained `shapes` model at its default steps and guidance, float32; PSNR against the serial image, in dB.",
        "",
        "| ranks | case | captions | facts read | PSNR median | PSNR worst |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['nproc']} | {row['case']} | {row['num_captions']} | {100 * row['facts_read']:.2f} % | "
            f"{row['psnr_median']:.1f} | {row['psnr_min']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Config))
