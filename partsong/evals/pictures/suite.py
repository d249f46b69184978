"""Scores what was sampled, and writes it: rows, pictures or videos, and a sheet of some of them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from partsong import zoo
from partsong.evals.pictures.sampling import ComparingJob, Way
from partsong.evals.pictures.scorers import ScoringFiles
from partsong.evals.pictures.scoring import Scored, rows_of, score, why_missing
from partsong.evals.pictures.sheet import AMPLIFIED, Panel, Row, Tile, difference, draw_sheet
from partsong.evals.pictures.shelf import Frames, Shelf
from partsong.jobs.videos import VideoJob
from partsong.outputs import rgb_bytes, save_image
from partsong.videos import save_video

__all__ = ["measure"]

#: Frames of a video that the sheet shows.
_SHOWN_FRAMES = 6
_DIFFERENCE = f"difference x {AMPLIFIED}"


def measure(comparison: ComparingJob, files: ScoringFiles, *, shown: int = 8) -> dict[str, Any]:
    """Scores the samples that `partsong.evals.pictures.sampling.sample` has put into the folder of a comparison.

    Args:
        comparison: what was sampled.
        files: networks that score.
        shown: how many prompts the sheet shows.

    Returns:
        ``rows``, a flat one for each way to sample; ``samples``, a flat one for each picture or video; ``notes`` on
        what is missing, ``sheet``, its path, and how much it amplifies differences.
    """
    name, shelf, scorers = comparison.base.zoo_name, Shelf(comparison.base.out, comparison.settings), files.open()
    scored = score(comparison, shelf, scorers, None if name is None else zoo.MODELS[name].task)
    shelf.close()
    rows = rows_of(comparison, scored, scorers)
    panels = [_panel(comparison, shelf, scored, number) for number in range(min(shown, len(comparison.texts)))]
    heading = f"{Path(comparison.settings['model']).name}, seed {comparison.base.seed}; below each strategy's samples: "
    sheet = draw_sheet(f"{heading}their difference from serial, {AMPLIFIED} times as bright (black is equal)", panels)
    return {
        "rows": rows,
        "samples": [_sample(shelf, each, comparison) for samples in scored.values() for each in samples],
        "notes": why_missing(rows, scorers),
        "sheet": save_image(np.asarray(sheet), comparison.base.out / "sheet.png"),
        "amplified": AMPLIFIED,
    }


def _sample(shelf: Shelf, scored: Scored, comparison: ComparingJob) -> dict[str, Any]:
    """Writes a picture or video, and describes it in a flat row."""
    record, job = scored.record, comparison.base
    frames = shelf.frames(record.way, record.number)
    if isinstance(job, VideoJob):
        path = save_video(list(frames), shelf.path(record.way, record.number, ".mp4"), fps=job.fps)
    else:
        path = save_image(frames[0], shelf.path(record.way, record.number, ".png"))
    means = {name: statistics.fmean(values) for name, values in scored.values.items() if values}
    if psnrs := scored.values.get("psnr"):
        means["psnr"] = statistics.median(psnrs)
    return {"strategy": record.way, "number": record.number, "prompt": record.prompt, "file": path, **means}


def _panel(comparison: ComparingJob, shelf: Shelf, scored: dict[str, list[Scored]], number: int) -> Panel:
    """Shows one prompt: pictures in one row and their differences in the next, or for videos two rows for each way.

    A serial way stands before the strategies that are compared with it.
    """
    above, below, rows = [], [], []
    for way in comparison.ways:
        frames, label = shelf.frames(way.name, number), _label(way, scored[way.name][number])
        twin = None if way.twin is None else shelf.frames(way.twin, number)
        if comparison.videos:
            rows += _rows(frames, twin, label)
        else:
            above.append(Tile(pixels=rgb_bytes(frames[0]), label=label.replace(", ", "\n", 1)))
            apart = None if twin is None else difference(frames[0], twin[0])
            below.append(None if apart is None else Tile(pixels=apart, label=_DIFFERENCE))
    pictures = [Row(tiles=tiles) for tiles in (above, below) if any(tiles)]
    return Panel(title=f"{number}: {comparison.texts[number]}", rows=[*pictures, *rows])


def _rows(frames: Frames, twin: Frames | None, label: str) -> list[Row]:
    """Shows frames of a video at even distances, the first and the last among them."""
    numbers = np.linspace(0, len(frames) - 1, min(len(frames), _SHOWN_FRAMES)).round().astype(int)
    tiles = [Tile(pixels=rgb_bytes(frames[number]), label=f"frame {number}") for number in numbers]
    if twin is None:
        return [Row(tiles=tiles, label=label)]
    apart = [Tile(pixels=difference(frames[number], twin[number])) for number in numbers]
    return [Row(tiles=tiles, label=label), Row(tiles=apart, label=_DIFFERENCE)]


def _label(way: Way, scored: Scored) -> str:
    parts = [way.name, f"{scored.record.seconds:.2f} s"]
    if psnrs := scored.values.get("psnr"):
        middle = statistics.median(psnrs)
        parts.append("equal" if math.isinf(middle) else f"{middle:.1f} dB")
    return ", ".join(parts)
