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

#: One kind of model each: text and picture in one attention, two guidance calls a step, text by cross-attention, masks
#: by which samples are told apart, rows of a UNet.
PIPELINES = ("StableDiffusion3Pipeline", "QwenImagePipeline", "WanPipeline", "MochiPipeline", "StableDiffusionPipeline")


def pairs() -> list[Pair]:
    """Every pipeline with every strategy that its model does not refuse."""
    found = []
    for name in PIPELINES:
        rows = [adapter_for(each) for each in denoisers(CASES[name].make())]
        for label, strategies in STRATEGIES.items():
            refused = any(strategy.refuses(row) for strategy in strategies for row in rows)
            if not refused and label not in steps_worker.LEFT_OUT.get(name, ()):
                found.append((name, label))
    return found


def row(step: Step, alone: Step) -> dict[str, Any]:
    """A rank's row: what partsong adds to a step, by what and where, with its memory and its messages.

    What the model and its pipeline do themselves is left out; under a plan it may be no more than without one.
    """
    for kind in ("waits", "uploads"):
        counts = (getattr(each, kind) for each in (step, alone))
        mine, without = ({name: n for name, n in each.items() if " partsong/" not in name} for each in counts)
        assert all(times <= without.get(name, 0) for name, times in mine.items()), (mine, without)
    return {
        "waits": {name: times for name, times in step.waits.items() if " partsong/" in name},
        "uploads": {name: times for name, times in step.uploads.items() if " partsong/" in name},
        "late": sum(step.late.values()),
        "fresh": sum(step.fresh.values()),
        "messages": step.messages,
    }


def measured(wanted: list[Pair]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The rows of some pairs on two ranks, by pipeline and strategy."""
    found = launch(steps_worker.steps, 2, 2, wanted)
    table: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, label in wanted:
        alone = found[name, f"alone, {steps_worker.SAMPLES.get(label, 1)}"]
        both = zip(found[name, label], alone, strict=True)
        table.setdefault(name, {})[label] = [row(step, alone) for step, alone in both]
    return table


def read() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The table as it is checked in."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    rows = read() if FILE.exists() and sys.argv[1:] else {}
    for name in sys.argv[1:] or PIPELINES:
        rows |= measured([pair for pair in pairs() if pair[0] == name])
        FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
