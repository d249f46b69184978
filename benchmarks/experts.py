"""Reads facts of separately trained experts: ``python benchmarks/experts.py --run RUN``.

RUN is the folder of zoo/recipes/train_shapes_experts.py. It compares the mixture, full and with the largest weights
only, at several temperatures of the router, with the monolith of equal compute and with the model that all began as.
Without a run it reads the experts that ship, and no monolith.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import ExpertParallel, parallelize, zoo
from partsong_zoo.scoring import FactScore
from partsong_zoo.shapes.scoring import score
from partsong_zoo.shapes_experts.loading import changed_transformer, put_experts

TEMPERATURES = (0.25, 0.5, 1.0, 2.0)
EXPERTS = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    run: Path | None = None
    """Folder of the recipe's run, whose stages have ended; if not given, the experts that ship."""
    only: str = ""
    """Samples only the cases of the mixture whose names begin with this."""
    captions: int = 100
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def cases() -> dict[str, ExpertParallel]:
    """Lists the settings of the mixture, by name."""
    named = {"top 1": ExpertParallel(top_k=1)}
    for top_k, words in ((2, "top 2"), (EXPERTS, "all")):
        for warmth in TEMPERATURES:
            named[f"{words}, temperature {warmth:g}"] = ExpertParallel(top_k=top_k, temperature=warmth)
    return named


def main(config: Config) -> None:
    """Samples and writes the files."""
    torch.set_num_threads(1)
    rows = [_row("the shipped model", 0, _scored(config, None, None))]
    if config.run is not None:
        monolith = changed_transformer(zoo.MODELS["shapes"].folder, config.run / "monolith.safetensors")
        rows.append(_row("monolith of equal compute", 1, _scored(config, monolith, None)))
    mixture = _mixture(config)
    for name, strategy in cases().items():
        if not name.startswith(config.only):
            continue
        rows.append(_row(name, strategy.top_k or EXPERTS, _scored(config, mixture, strategy)))
        _file(config, rows)  # a case takes minutes


def _mixture(config: Config) -> nn.Module:
    pipe, shipped = zoo.load("shapes"), zoo.MODELS["shapes-experts"].folder
    put_experts(pipe, zoo.MODELS["shapes"].folder, shipped if config.run is None else config.run / "export")
    return pipe.transformer


def _scored(config: Config, transformer: nn.Module | None, strategy: ExpertParallel | None) -> FactScore:
    pipe: Any = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    if transformer is not None:
        pipe.transformer = transformer
    arguments = {**zoo.MODELS["shapes"].defaults, "seed": config.seed, "batch": 25}
    if strategy is None:
        return score(pipe, config.captions, **arguments)
    with parallelize(pipe, strategy):
        return score(pipe, config.captions, **arguments)


def _row(case: str, asked: int, result: FactScore) -> dict[str, Any]:
    kinds = {kind: round(share, 4) for kind, (share, _) in result.by_kind().items()}
    facts = {"facts_read": result.facts_read, "standard_error": result.standard_error, "all_right": result.all_right}
    return {"case": case, "experts_asked": asked, **facts, "by_kind": kinds}


def _file(config: Config, rows: list[dict[str, Any]]) -> None:
    defaults = zoo.MODELS["shapes"].defaults
    note = (
        f"`shapes` and what became of it, {defaults['num_inference_steps']} steps, guidance "
        f"{defaults['guidance_scale']:g}, float32, the same {config.captions} captions and noise in every row. "
        "The error is that of the mean over captions; rows share captions, so their differences are more certain."
    )
    kinds = list(rows[0]["by_kind"])
    columns = ("case", "experts asked", "facts read", "error", "all right", *kinds)
    lines = [
        (
            each["case"],
            each["experts_asked"] or "",
            f"{100 * each['facts_read']:.2f} %",
            f"{100 * each['standard_error']:.1f}",
            f"{100 * each['all_right']:.0f} %",
            *(f"{100 * each['by_kind'][kind]:.1f}" for kind in kinds),
        )
        for each in rows
    ]
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Facts read of experts trained apart", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
