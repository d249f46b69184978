"""Compares what `StepCache` leaves out and how it forecasts: ``python benchmarks/steps/step_cache.py``.

``--no-masks --no-thresholds --measures`` compares its measures at equal shares of block evaluations: the threshold of
each is searched on the first captions. One process. A block evaluation is one call of one block of the model; the share
is of those that all steps would make.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import StepCache, zoo
from partsong.outputs import psnr
from partsong.parallel import parallelize
from partsong.seeds import generators

#: Which of 28 steps are computed: a half of them, and one more.
MASKS = (
    "1010101010101010100010101011",
    "1010101010101010101010101011",
)
MEASURES: tuple[Any, ...] = ("first_block", "input", "magnitude", "spectral")
FORECASTS: tuple[Any, ...] = ("hold", "half", "linear", "quadratic", "foca")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    captions: int = 100
    """How many fresh captions."""
    batch: int = 20
    """Pictures in one call, where nothing depends on the other pictures of a call."""
    masks: bool = True
    """Whether to sample masks."""
    thresholds: bool = True
    """Whether to sample thresholds too, which takes a call for each picture."""
    measures: bool = False
    """Whether to sample every measure at thresholds with equal shares of block evaluations."""
    shares: list[float] = field(default_factory=lambda: [0.5, 0.65])
    """Shares of block evaluations at which measures are compared."""
    searched: int = 8
    """On how many captions thresholds are searched."""
    seed: int = 0
    """Seed of captions and noise."""


def caches(config: Config) -> Iterator[StepCache]:
    """Lists the compared cases."""
    for mask, forecast in itertools.product(MASKS if config.masks else (), FORECASTS):
        yield StepCache(warmup_steps=1, mask=mask[1:], forecast=forecast)
    if config.thresholds:
        for threshold, forecast in itertools.product((0.08, 0.16), FORECASTS[:3]):
            yield StepCache(threshold=threshold, forecast=forecast)


def main(config: Config) -> None:
    """Samples and writes the files."""
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS["shapes"], zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    steps = int(row.defaults["num_inference_steps"])
    serial = Sampled("serial", 1.0, list(_pictures(pipe, config, steps, config.batch)))
    rows = [_row(serial, serial, config)]
    fewer = steps // 2
    rows.append(
        _row(Sampled(f"{fewer} steps", 0.5, list(_pictures(pipe, config, fewer, config.batch))), serial, config)
    )
    measured = (each for each in MEASURES if config.measures)
    matched = (_matched(pipe, config, *each) for each in itertools.product(measured, ("hold", "linear"), config.shares))
    for cache in itertools.chain(caches(config), matched):
        rows.append(_row(_cached(pipe, config, cache), serial, config))
        print(rows[-1], flush=True)
    _file(config, steps, rows)


@dataclass(frozen=True)
class Sampled:
    """Holds the pictures of a row."""

    case: str
    share: float
    images: list[Any]


def _pictures(pipe: Any, config: Config, steps: int, batch: int) -> Iterator[Any]:
    """Yields the picture of each caption; its noise is the same in calls of any size."""
    row = zoo.MODELS["shapes"]
    captions, draws = row.task.captions(config.captions, config.seed), generators(config.seed, config.captions)
    for first in range(0, config.captions, batch):
        some = slice(first, first + batch)
        asked = {**row.defaults, "num_inference_steps": steps, "output_type": "np"}
        yield from pipe(**asked, prompt=list(captions[some]), generator=list(draws[some])).images


def _cached(pipe: Any, config: Config, cache: StepCache) -> Sampled:
    """Samples under a cache."""
    steps, images, shares = zoo.MODELS["shapes"].defaults["num_inference_steps"], list[Any](), list[float]()
    with parallelize(pipe, cache) as plan:
        blocks: Any = plan.denoisers[0].attachments[0]
        for image in _pictures(pipe, config, steps, config.batch):
            images.append(image)
            shares.append(blocks.evaluations / ((blocks.computed + blocks.skipped) * len(blocks.blocks)))
    what = f"{cache.measure}, threshold {cache.threshold:.3g}" if cache.mask is None else f"mask 1{cache.mask}"
    return Sampled(f"{what}, {cache.forecast}", statistics.fmean(shares), images)


def _matched(pipe: Any, config: Config, measure: Any, forecast: Any, share: float) -> StepCache:
    """Searches the threshold at which a measure has a share of the block evaluations, on the first captions."""
    few, low, high = dataclasses.replace(config, captions=config.searched), 1e-3, 4.0
    for _ in range(8):
        cache = StepCache(measure=measure, forecast=forecast, threshold=math.sqrt(low * high))
        low, high = (low, cache.threshold) if _cached(pipe, few, cache).share < share else (cache.threshold, high)
    return StepCache(measure=measure, forecast=forecast, threshold=high)


def _row(sampled: Sampled, serial: Sampled, config: Config) -> dict[str, Any]:
    task = zoo.MODELS["shapes"].task
    captions = task.captions(config.captions, config.seed)
    apart = [min(psnr(got, wanted), 999.0) for got, wanted in zip(sampled.images, serial.images, strict=True)]
    facts = [task.facts_read(caption, image) for caption, image in zip(captions, sampled.images, strict=True)]
    return {
        "case": sampled.case,
        "share": sampled.share,
        "psnr_median": statistics.median(apart),
        "psnr_worst": min(apart),
        "facts_read": statistics.fmean(facts),
    }


def _file(config: Config, steps: int, rows: list[dict[str, Any]]) -> None:
    """Writes both files."""
    note = (
        f"`shapes` at {steps} steps and its default guidance, {config.captions} captions. The share is of the block "
        "evaluations that all steps would make. Masks have a digit for each step, 1 computed and 0 left out; the last "
        "step is always computed. With a threshold on `first_block` the first block of a step always runs; at most 3 "
        "steps in a row are left out. PSNR in dB against the serial picture."
    )
    columns = ("case", "block evaluations", "PSNR median", "worst", "facts read")
    lines = [
        (
            each["case"],
            f"{100 * each['share']:.1f} %",
            f"{each['psnr_median']:.1f}",
            f"{each['psnr_worst']:.1f}",
            f"{100 * each['facts_read']:.1f} %",
        )
        for each in rows
    ]
    title = "What a step cache leaves out, and how it forecasts"
    file_result(config.out, __file__, rows, title, note, markdown_table(columns, lines))


if __name__ == "__main__":
    main(tyro.cli(Config))
