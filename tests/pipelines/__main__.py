"""Tries pipelines whose names begin as asked, and prints what became of each: ``python -m tests.pipelines 2 Flux``."""

from __future__ import annotations

import multiprocessing
import sys

from partsong.parallel.ranks.launch import launch
from tests.pipelines import worker
from tests.pipelines.cases import CASES


def main() -> None:
    """Prints one line per pipeline and strategy, and the whole text where something is wrong."""
    nproc, begins = int(sys.argv[1]), tuple(sys.argv[2:]) or ("",)
    names = [name for name in CASES if name.startswith(begins)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.pipelines.worker"])
    for name in names:
        rows = launch(worker.outcomes, nproc, nproc, [(name, strategy) for strategy in worker.STRATEGIES])
        for (_, strategy), ranks in rows.items():
            row = max(ranks, key=lambda outcome: (outcome.kind != "ran", outcome.error))
            bytes_differ = "" if row.sent == row.predicted else f" but {row.predicted} predicted"
            right = row.error <= CASES[name].tolerance and row.kind in ("ran", "refused")
            flag = "     " if right and not bytes_differ else "WRONG"
            text = f"error {row.error:.1e}, sent {row.sent}{bytes_differ}" if row.kind == "ran" else row.text
            print(f"{flag} {name:40} {strategy:15} {row.kind:13} {text}")


if __name__ == "__main__":
    main()
