"""Measures facts read and drift of the zoo's pictures under strategies.

``python benchmarks/drift/zoo_drift.py`` samples fresh captions serially and with each strategy of a suite, on each
number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks.drift.study import study
from benchmarks.filing import file_result, markdown_table, result_path
from partsong import DisplacedPatch, LatentParallel, PartialPatch, PatchPipeline, StepCache, SyncPatch, Ulysses
from partsong.parallel import Strategy

Cases = list[tuple[Strategy, ...]]
DISPLACED: Cases = [
    *((DisplacedPatch(warmup_steps=steps),) for steps in (2, 4)),
    (DisplacedPatch(warmup_steps=2, order=0),),
]
PORTIONS: Cases = [
    (DisplacedPatch(),),
    *((PartialPatch(portion=portion),) for portion in (0.1, 0.3, 0.5)),
    *((PartialPatch(portion=0.3, far=far),) for far in (0.3, 0.6)),
    (PartialPatch(portion=0.3, order=0),),
    (PartialPatch(portion="auto"),),
]
PARTS: Cases = [
    (LatentParallel(context=None),),
    *((LatentParallel(context=stride),) for stride in (4, 2)),
    (LatentParallel(context=2, warmup_steps=6),),
    *((LatentParallel(context=2, overlap=0.5, warmup_steps=steps),) for steps in (0, 6)),
]
#: In four steps.
FEW: Cases = [
    *((LatentParallel(context=stride),) for stride in (None, 4, 2)),
    (LatentParallel(context=2, warmup_steps=1),),
    *((LatentParallel(context=2, overlap=0.5, warmup_steps=steps),) for steps in (0, 1)),
    (LatentParallel(context=2, overlap=0.75),),
    *((DisplacedPatch(warmup_steps=steps),) for steps in (1, 2)),
]
#: UNets see their part alone.
PICTURES: Cases = [(LatentParallel(),), (LatentParallel(warmup_steps=6),), (LatentParallel(overlap=0.5),)]
#: The compositions of strategies to sample each zoo model with, after its serial twin.
METHODS: dict[str, Cases] = {
    "shapes": [
        (Ulysses(),),
        *DISPLACED,
        *((PatchPipeline(warmup_steps=n),) for n in (1, 2)),
        *((Ulysses(), StepCache(threshold=threshold)) for threshold in (0.04, 0.08, 0.16)),
    ],
    "shapes-unet": [(SyncPatch(),), *DISPLACED, *((DisplacedPatch(warmup_steps=n, norms="forecast"),) for n in (2, 4))],
}
SUITES: dict[str, dict[str, Cases]] = {
    "methods": METHODS,
    "norms": {"shapes-unet": [(DisplacedPatch(warmup_steps=n, norms="forecast"),) for n in (2, 4)]},
    "partial-patch": {"shapes": PORTIONS, "shapes-unet": PORTIONS},
    "few-portions": {model: [PORTIONS[0], *PORTIONS[2:4], PORTIONS[-1]] for model in ("shapes", "shapes-unet")},
    "latent-parallel": {"shapes": PARTS, "shapes-few": FEW, "shapes-unet": PICTURES},
    "latent-overlap": {"shapes": [(LatentParallel(),), (LatentParallel(context=2, overlap=0.75),)]},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    suite: str = "methods"
    """What to sample with: ``methods``, ``norms``, ``partial-patch``, ``few-portions``, ``latent-parallel`` or
    ``latent-overlap``."""
    model: list[str] = field(default_factory=lambda: list(METHODS))
    """Models of the zoo."""
    nproc: list[int] = field(default_factory=lambda: [2, 4])
    """Numbers of ranks."""
    captions: int = 100
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    note = (
        "The trained models at their default steps and guidance, float32; PSNR against the serial image, in dB; "
        "megabytes that the busiest rank sends per image, and seconds per image with one thread per rank."
    )
    rows: list[dict[str, Any]] = []
    for model in config.model:
        for nproc in config.nproc:
            measured = study(
                SUITES[config.suite][model], nproc=nproc, model=model, num_captions=config.captions, seed=config.seed
            )
            rows += [{"model": model, **row} for row in measured]
            # A study takes minutes, so the rows so far are written after each.
            file_result(config.out, __file__, rows, "Drift of the zoo's pictures", note, _table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("model", "ranks", "case", "captions", "facts read", "PSNR median", "PSNR worst", "MB", "s")
    lines = [
        (
            row["model"],
            row["nproc"],
            row["case"],
            row["num_captions"],
            f"{100 * row['facts_read']:.2f} %",
            f"{row['psnr_median']:.1f}",
            f"{row['psnr_min']:.1f}",
            f"{row['bytes_sent'] / 1e6:.2f}",
            f"{row['seconds']:.2f}",
        )
        for row in rows
    ]
    return markdown_table(columns, lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
