"""Scores the samples of a comparison, and sums them up in a row for each way to sample."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.evals.pictures import closeness, lpips
from partsong.evals.pictures.clip import clip_scores, frechet_distance, identity
from partsong.evals.pictures.sampling import ComparingJob, Way
from partsong.evals.pictures.scorers import WANTED, Scorers
from partsong.evals.pictures.shelf import Frames, Record, Shelf
from partsong.outputs import max_abs_diff
from partsong.progress import progress

__all__ = ["IMAGE_METRICS", "VIDEO_METRICS", "Scored", "rows_of", "score", "why_missing"]

#: What the rows of the two suites hold beside the name, the class and the number of samples.
_CLOSE = ("psnr", "psnr_lowest", "max_abs_diff", "ssim", "lpips")
IMAGE_METRICS = (*_CLOSE, "clip_score", "aesthetic", "fid_clip", "facts_read", "seconds", "speedup", "bytes_sent")
VIDEO_METRICS = (
    *(*_CLOSE, "clip_score", "flicker", "flicker_ratio", "identity_clip", "identity_kept", "facts_read"),
    *("seconds", "speedup", "first_frame_seconds", "bytes_sent"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Holds the scores of one sample.

    Attributes:
        record: how it was sampled.
        values: by metric; a number for each frame, or a single one for a video, or none where it cannot be computed.
        features: of its frames, `[F, D]`, where there is a CLIP model.
    """

    record: Record
    values: dict[str, list[float]] = field(default_factory=dict)
    features: Tensor | None = None


def score(
    comparison: ComparingJob, shelf: Shelf, scorers: Scorers, task: ModuleType | None = None
) -> dict[str, list[Scored]]:
    """Scores every sample.

    Args:
        comparison: what was sampled.
        shelf: its folder.
        scorers: networks that score.
        task: the task of a zoo model, which reads pictures.

    Returns:
        For each way to sample its samples in order.

    Raises:
        ArgumentError: a sample has another size than its serial twin.
    """
    numbers = range(len(comparison.prompts))
    todo = [(way, number) for way in comparison.ways for number in numbers]
    scored: dict[str, list[Scored]] = {way.name: [] for way in comparison.ways}
    for way, number in progress(todo, "scores", unit="sample"):
        frames = shelf.frames(way.name, number)
        each = Scored(record=shelf.records[way.name, number])
        if way.twin is not None:
            each.values.update(_closeness(way, frames, shelf.frames(way.twin, number), scorers))
        each.values.update(_alone(each.record, frames, task, videos=comparison.videos))
        if scorers.clip is not None:
            features = scorers.clip.pictures(frames)
            texts = scorers.clip.texts([comparison.texts[number]])
            each.values.update(_by_features(features, texts, scorers))
            each = Scored(record=each.record, values=each.values, features=features)
        scored[way.name].append(each)
    return scored


def _closeness(way: Way, frames: Frames, twin: Frames, scorers: Scorers) -> dict[str, list[float]]:
    if frames.shape != twin.shape:
        raise ArgumentError(f"{way.name} made {list(frames.shape)} values, {way.twin} {list(twin.shape)}")
    values = {
        "psnr": closeness.psnrs(frames, twin),
        "max_abs_diff": [max_abs_diff(frames, twin)],
        "ssim": closeness.ssims(frames, twin),
    }
    if scorers.lpips is not None and min(frames.shape[1:3]) >= lpips.SMALLEST:
        values["lpips"] = scorers.lpips(closeness.as_batch(frames), closeness.as_batch(twin)).tolist()
    return values


def _alone(record: Record, frames: Frames, task: ModuleType | None, *, videos: bool) -> dict[str, list[float]]:
    values: dict[str, Any] = {"seconds": record.seconds, "first_frame_seconds": record.first_frame_seconds}
    if videos:
        values["flicker"] = closeness.flicker(frames)
    if task is not None:
        values["facts_read"] = task.facts_read(record.prompt, frames if videos else frames[0])
        if videos and values["facts_read"] is not None:
            values["identity_kept"] = task.identity_kept(record.prompt, frames)
    return {name: [] if value is None else [float(value)] for name, value in values.items()}


def _by_features(features: Tensor, texts: Tensor, scorers: Scorers) -> dict[str, list[float]]:
    kept = identity(features)
    return {
        "clip_score": clip_scores(features, texts),
        "aesthetic": [] if scorers.aesthetic is None else scorers.aesthetic(features),
        "identity_clip": [] if kept is None else [kept],
    }


def rows_of(comparison: ComparingJob, scored: dict[str, list[Scored]], scorers: Scorers) -> list[dict[str, Any]]:
    """Returns a flat row for each way to sample.

    Args:
        comparison: what was sampled.
        scored: what `score` returned.
        scorers: for the reference pictures.

    Returns:
        Rows with `IMAGE_METRICS` or `VIDEO_METRICS`; None for what was not computed.
    """
    metrics = VIDEO_METRICS if comparison.videos else IMAGE_METRICS
    return [_row(way, scored, scorers, metrics) for way in comparison.ways]


def _row(way: Way, scored: dict[str, list[Scored]], scorers: Scorers, metrics: Sequence[str]) -> dict[str, Any]:
    own, twin = scored[way.name], scored[way.twin or way.name]
    psnrs, flicker, plain = _all(own, "psnr"), _mean(own, "flicker"), _mean(twin, "flicker")
    seconds = statistics.median(_all(own, "seconds"))
    first = _all(own, "first_frame_seconds")
    special = {
        "psnr": statistics.median(psnrs) if psnrs else None,
        "psnr_lowest": min(psnrs, default=None),
        "max_abs_diff": max(_all(own, "max_abs_diff"), default=None),
        "fid_clip": _distance(own, None if way.twin is None else twin, scorers.reference),
        "flicker_ratio": flicker / plain if flicker is not None and plain else None,
        "seconds": seconds,
        "speedup": statistics.median(_all(twin, "seconds")) / seconds,
        "first_frame_seconds": statistics.median(first) if first else None,
        "bytes_sent": [round(statistics.mean(sent)) for sent in zip(*(s.record.bytes_sent for s in own), strict=True)],
    }
    named = {"strategy": way.name, "class": own[0].record.kind, "num": len(own)}
    return named | {name: special[name] if name in special else _mean(own, name) for name in metrics}


def _all(scored: Iterable[Scored], name: str) -> list[float]:
    return [value for each in scored for value in each.values.get(name, [])]


def _mean(scored: Iterable[Scored], name: str) -> float | None:
    values = _all(scored, name)
    return statistics.fmean(values) if values else None


def _distance(own: Sequence[Scored], twin: Sequence[Scored] | None, reference: Tensor | None) -> float | None:
    """Compares with the reference pictures, or with the serial ones where there is no reference."""
    features = [each.features for each in own if each.features is not None]
    if reference is None:
        others = [each.features for each in twin or () if each.features is not None]
        reference = torch.cat(others) if others else None
    return None if reference is None or not features else frechet_distance(torch.cat(features), reference)


def why_missing(rows: Sequence[dict[str, Any]], scorers: Scorers) -> list[str]:
    """Returns a line for each metric that no row has, with the option that it wants or what is in the way."""
    missing = [name for name in rows[0] if all(row[name] is None for row in rows)]
    compared = len(rows) > 1
    reasons = {
        "ssim": f"needs sides of {closeness.SMALLEST} pixels or more",
        "fid_clip": "needs two pictures or more, and --reference FOLDER or a strategy to compare with serial",
        "lpips": f"needs sides of {lpips.SMALLEST} pixels or more",
        "flicker": "needs two frames or more",
        "identity_clip": "needs two frames or more",
    }
    given = {"lpips": scorers.lpips, "aesthetic": scorers.aesthetic}
    lines = []
    for name in missing:
        if name in WANTED and given.get(name, scorers.clip) is None:
            lines.append(f"{name}: give {WANTED[name]}")
        elif name in reasons and (compared or name == "fid_clip"):
            lines.append(f"{name}: {reasons[name]}")
    return lines
