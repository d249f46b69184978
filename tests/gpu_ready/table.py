"""The table of what a step does, checked in beside this file; ``python -m tests.gpu_ready.table`` writes it anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from partsong.parallel.adapters import adapter_for
from partsong.parallel.ranks.launch import launch
from tests.gpu_ready import steps_worker
from tests.gpu_ready.steps_worker import STRATEGIES, Pair, Step
from tests.pipelines.case import denoisers
from tests.pipelines.cases import CASES

FILE = Path(__file__).with_name("steps.json")

#: One kind of model each, and what it is tried with: text and picture in one attention, text by cross-attention with
#: two guidance calls a step, such calls whose arguments are new in each, masks by which samples are cut, rows.
PIPELINES: dict[str, tuple[str, ...]] = {
    "StableDiffusion3Pipeline": tuple(STRATEGIES),
    "WanPipeline": tuple(STRATEGIES),
    "QwenImagePipeline": ("CfgParallel", "Ulysses", "TensorParallel", "PatchPipeline"),
    "MochiPipeline": ("Ulysses", "SyncPatch", "DisplacedPatch"),
    "StableDiffusionPipeline": ("CfgParallel", "SyncPatch", "DisplacedPatch", "TensorParallel"),
}


def pairs() -> list[Pair]:
    """Every pipeline with those of its strategies that its model does not refuse."""
    found = []
    for name, labels in PIPELINES.items():
        rows = [adapter_for(each) for each in denoisers(CASES[name].make())]
        for label in labels:
            if not any(strategy.refuses(row) for strategy in STRATEGIES[label] for row in rows):
                found.append((name, label))
    return found


def row(step: Step, alone: Step, calls_more: bool) -> dict[str, Any]:
    """A rank's row: what partsong adds to a step, by what and where, with its memory and its messages.

    What the model and its pipeline do themselves is left out. Under a plan it may be no more than without one, unless
    the strategy calls the model more often.
    """
    for kind in ("waits", "uploads"):
        counts = (getattr(each, kind) for each in (step, alone))
        mine, without = ({name: n for name, n in each.items() if " partsong/" not in name} for each in counts)
        assert calls_more or all(times <= without.get(name, 0) for name, times in mine.items()), (mine, without)
    return {
        "waits": {name: times for name, times in step.waits.items() if " partsong/" in name},
        "uploads": {name: times for name, times in step.uploads.items() if " partsong/" in name},
        "late": sum(step.late.values()),
        "fresh": sum(step.fresh.values()),
        "messages": step.messages,
        "changed": step.changed,
        "moved": step.moved,
    }


def measured(wanted: list[Pair]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The rows of some pairs on two ranks, by pipeline and strategy."""
    found = launch(steps_worker.steps, 2, 2, wanted)
    table: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, label in wanted:
        alone = found[name, f"alone, {steps_worker.SAMPLES.get(label, 1)}"]
        both = zip(found[name, label], alone, strict=True)
        calls_more = any(strategy.has_loop for strategy in STRATEGIES[label])
        table.setdefault(name, {})[label] = [row(*each, calls_more) for each in both]
    return table


def read() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The table as it is checked in."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write_missing() -> None:
    """Measures the pairs that the table lacks, and drops those that are no more."""
    rows, wanted = read(), pairs()
    found = measured([pair for pair in wanted if pair[1] not in rows.get(pair[0], {})])
    kept = {name: rows.get(name, {}) | found.get(name, {}) for name in PIPELINES}
    _write({name: {label: kept[name][label] for other, label in wanted if other == name} for name in PIPELINES})


def _write(rows: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    rows = read() if FILE.exists() and sys.argv[1:] else {}
    for name in sys.argv[1:] or PIPELINES:
        rows |= measured([pair for pair in pairs() if pair[0] == name])
        _write(rows)
