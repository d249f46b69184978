"""Checks a machine with GPUs, or in minutes at tiny sizes one without.

python -m partsong.evals.gpu --seconds 480 --out gpu.json
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from partsong.errors import ArgumentError
from partsong.evals.gpu import driver
from partsong.evals.gpu.trials import TRIALS, equipment_here, machine_facts
from partsong.foreign_messages import hide_foreign_messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages and returns the exit code: 1 where a row is not ok, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m partsong.evals.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=driver.USUAL_SECONDS, help="for all stages")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file to write, after every stage")
    parser.add_argument("--stages", default="", help=f"some of {','.join(trial.name for trial in TRIALS)}")
    asked = parser.parse_args(arguments)
    hide_foreign_messages()
    logging.basicConfig(format="%(message)s")
    driver.logger.setLevel(logging.INFO)
    try:
        trials = driver.chosen(TRIALS, asked.stages)
        rows = driver.run(trials, equipment_here(), asked.seconds, asked.out, machine_facts())
    except ArgumentError as error:
        sys.stderr.write(f"partsong: error: {error}\n")
        return 2
    sys.stdout.write(f"{driver.summary(rows)}\nrows: {asked.out}\n")
    return int(any(row["ok"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
