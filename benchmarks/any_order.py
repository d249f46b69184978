"""Reads facts of pictures that were decided in any order: ``python benchmarks/any_order.py``.

One model, three curves: groups of LPD from 64 steps down to 4, with their loss when one of their ideas is left out;
guesses that are checked (ASSD), and windows that settle (keyed Jacobi), for which forwards are counted and tokens are
compared with those of one token a forward.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import seeds, zoo
from partsong.samplers.any_order import ASSD, LPD, KeyedJacobi, PictureRule
from partsong_zoo.shapes.grammar import captions
from partsong_zoo.tiles.loading import TilesModel, load_tiles
from partsong_zoo.tiles.scoring import score_tiles

#: Pictures of one call.
BATCH = 40


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: Path | None = None
    """Folder of the model; that of the zoo if not given."""
    captions: int = 200
    """How many fresh captions."""
    compared: int = 40
    """Pictures whose tokens and forwards are compared for the exact rules."""
    timed: int = 15
    """Pictures that are timed one by one for each row."""
    guidance: float | None = None
    """How far to go beyond the captions' own logits; the model's own number if not given."""
    seed: int = 0
    """Seed of captions, orders and tokens."""


def cases() -> dict[str, PictureRule]:
    """Lists the rules, by name; the first is what others are compared with."""
    steps = {f"LPD, {steps} steps": LPD(steps=steps) for steps in (64, 32, 16, 12, 8, 4)}
    left_out = {
        f"{steps} steps, {words}": rule
        for steps in (12, 8)
        for words, rule in (
            ("random order", LPD(steps=steps, order="random")),
            ("raster groups", LPD(steps=steps, order="raster")),
            ("questions alone", LPD(steps=steps, mutual=False)),
        )
    }
    return {**steps, **left_out, "64 steps, raster": LPD(steps=64, order="raster")}


def exact_cases() -> dict[str, PictureRule]:
    """Lists the rules that give the tokens of one token a forward, by name."""
    checked = {f"ASSD, {drafts} drafts": ASSD(drafts=drafts) for drafts in (4, 8, 16)}
    settled = {f"keyed Jacobi, window {window}": KeyedJacobi(window=window) for window in (4, 8, 16, 32)}
    return {**checked, **settled, "keyed Jacobi, window 16, apart": KeyedJacobi(window=16, order="apart")}


def main(config: Config) -> None:
    """Samples and writes the files."""
    torch.set_num_threads(1)
    model = load_tiles(config.model or zoo.MODELS["tiles"].folder)
    rows: list[dict[str, Any]] = []
    for name, rule in cases().items():
        rows.append(_read(config, model, name, rule))
    for name, rule in exact_cases().items():
        rows.append(_compare(config, model, name, rule))
    _file(config, model, rows)


def _read(config: Config, model: TilesModel, name: str, rule: PictureRule) -> dict[str, Any]:
    result = score_tiles(model, rule, config.captions, seed=config.seed, batch=BATCH, guidance=config.guidance)
    alone = [_spent(model, rule, [text], config) for text in captions(config.timed, config.seed)]
    together = [_spent(model, rule, captions(BATCH, config.seed), config) / BATCH for _ in range(3)]
    return {
        "case": name,
        "facts_read": result.facts_read,
        "standard_error": result.standard_error,
        "all_right": result.all_right,
        "by_kind": {kind: round(share, 4) for kind, (share, _) in result.by_kind().items()},
        "forwards": rule.steps if isinstance(rule, LPD) else None,
        "processor_seconds": statistics.median(alone),
        "processor_seconds_together": statistics.median(together),
    }


def _spent(model: TilesModel, rule: PictureRule, texts: list[str], config: Config) -> float:
    """Returns the processor's seconds for the tokens of some pictures."""
    start = time.process_time()
    rule.decode(model.captioned(texts, config.guidance), seed=config.seed)
    return time.process_time() - start


def _compare(config: Config, model: TilesModel, name: str, rule: PictureRule) -> dict[str, Any]:
    """Decodes pictures one by one, since a batch takes the forwards of its slowest."""
    texts, forwards, rejected, differing = captions(config.compared, config.seed), [], [], 0
    spent = time.process_time()
    for number, text in enumerate(texts):
        decoded = rule.decode(model.captioned([text], config.guidance), seed=seeds.derive(config.seed, number))
        forwards.append(int(decoded.forwards))
        rejected.append(int(decoded.rejected) / max(int(decoded.drafted), 1))
    spent = time.process_time() - spent
    serial = time.process_time()
    for number, text in enumerate(texts):
        asking = model.captioned([text], config.guidance)
        key = seeds.derive(config.seed, number)
        twin, decoded = rule.serial().decode(asking, seed=key), rule.decode(asking, seed=key)
        differing += int((twin.tokens != decoded.tokens).sum())
    serial = time.process_time() - serial - spent
    return {
        "case": name,
        "forwards": statistics.fmean(forwards),
        "rejected": statistics.fmean(rejected),
        "differing_tokens": differing,
        "processor_seconds": spent / config.compared,
        "processor_seconds_serial": serial / config.compared,
    }


def _file(config: Config, model: TilesModel, rows: list[dict[str, Any]]) -> None:
    guidance = model.captioned(["a red circle"], config.guidance).guidance
    note = (
        f"`tiles`, 64 tokens a picture, guidance rising to {guidance:g}, float32, one thread, {config.captions} fresh "
        "captions, the same in every row. The error is that of the mean over captions. Seconds are those of the "
        f"processor, without drawing pixels: for one picture at a time, and per picture of a batch of {BATCH}, where "
        "all rules compute the same rows and differ in overhead alone. The second table is for one picture at a time, "
        f"{config.compared} of them, whose tokens are compared with one token a forward."
    )
    tables = _groups_table(rows) + "\n\n" + _exact_table(rows)
    file_result(config.out, __file__, rows, "Pictures in any order", note, tables)


def _groups_table(rows: list[dict[str, Any]]) -> str:
    whole = rows[0]
    kinds = list(whole["by_kind"])
    columns = ("case", "forwards", "facts read", "error", "all right", *kinds, "ms alone", "ratio", "ms in a batch")
    lines = [
        (
            row["case"],
            row["forwards"],
            f"{100 * row['facts_read']:.2f} %",
            f"{100 * row['standard_error']:.1f}",
            f"{100 * row['all_right']:.0f} %",
            *(f"{100 * row['by_kind'][kind]:.1f}" for kind in kinds),
            f"{1000 * row['processor_seconds']:.1f}",
            f"{whole['processor_seconds'] / row['processor_seconds']:.2f}",
            f"{1000 * row['processor_seconds_together']:.1f}",
        )
        for row in rows
        if "facts_read" in row
    ]
    return markdown_table(columns, lines)


def _exact_table(rows: list[dict[str, Any]]) -> str:
    columns = ("case", "forwards of 64", "rejected", "differing tokens", "ms a picture", "ms, one token a forward")
    lines = [
        (
            row["case"],
            f"{row['forwards']:.1f}",
            f"{100 * row['rejected']:.0f} %",
            row["differing_tokens"],
            f"{1000 * row['processor_seconds']:.0f}",
            f"{1000 * row['processor_seconds_serial']:.0f}",
        )
        for row in rows
        if "differing_tokens" in row
    ]
    return markdown_table(columns, lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
