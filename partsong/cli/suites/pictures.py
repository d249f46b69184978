"""Runs ``partsong eval images`` and ``partsong eval videos``, and prints a row for each way to sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.cli.arguments import read_arguments
from partsong.cli.bounds import check_files
from partsong.cli.ranks import is_main, num_ranks, prepare_ranks, run_on_ranks, under_torchrun
from partsong.cli.sampling import call_arguments, num_threads, place
from partsong.cli.suites.picture_options import PictureEval, VideoEval
from partsong.cli.table import table
from partsong.errors import ArgumentError
from partsong.jobs.pipeline_source import PipelineSource, class_number, find_pipeline
from partsong.seeds import check_seed
from partsong.videos import check_video_name

if TYPE_CHECKING:
    from partsong.evals.pictures.sampling import ComparingJob

__all__ = ["evaluate_images", "evaluate_videos", "summary"]

#: How the table writes a number.
_FORMS: dict[str, Callable[[Any], str]] = {
    "psnr": lambda value: _decibels(value),
    "psnr_lowest": lambda value: _decibels(value),
    "max_abs_diff": lambda value: f"{value:.1g}",
    "flicker_ratio": lambda value: f"{value:.3f}x",
    "facts_read": lambda value: f"{value:.1%}",
    "identity_kept": lambda value: f"{value:.1%}",
    "clip_score": lambda value: f"{value:.2f}",
    "aesthetic": lambda value: f"{value:.2f}",
    "seconds": lambda value: f"{value:.2f}",
    "first_frame_seconds": lambda value: f"{value:.2f}",
    "speedup": lambda value: f"{value:.2f}x",
    "bytes_sent": lambda value: f"{max(value) / 1e6:.2f} MB",
}


def evaluate_images(options: PictureEval) -> dict[str, Any]:
    """Samples pictures serially and with each strategy, and returns their scores."""
    from partsong.evals.pictures.scorers import ScoringFiles

    files = ScoringFiles(
        lpips=options.lpips, clip=options.clip, aesthetic=options.aesthetic, reference=options.reference
    )
    return _evaluate(options, "images", files)


def evaluate_videos(options: VideoEval) -> dict[str, Any]:
    """Samples videos serially and with each strategy, and returns their scores."""
    from partsong.evals.pictures.scorers import ScoringFiles

    if not 0 < options.fps < 1000:
        raise ArgumentError(f"--fps {options.fps}: frames per second lie between 0 and 1000")
    check_video_name("sample.mp4")
    return _evaluate(options, "videos", ScoringFiles(lpips=options.lpips, clip=options.clip))


def _evaluate(options: PictureEval | VideoEval, suite: str, files: Any) -> dict[str, Any]:
    from partsong.evals.pictures.sampling import is_sampled, sample
    from partsong.evals.pictures.suite import measure

    start, nproc = time.perf_counter(), num_ranks(options.nproc)
    files.check()
    comparison = _comparison(options, nproc)
    # Ranks of several machines need not share a disk, so the first one tells them what is there.
    if not (is_main() and is_sampled(comparison)) or under_torchrun():
        prepare_ranks(nproc, "partsong.evals.pictures.sampling")
        if not run_on_ranks(sample, nproc, comparison):
            return {}
    return {
        "command": "eval",
        "suite": suite,
        "nproc": nproc,
        "seed": options.seed,
        "seconds": time.perf_counter() - start,
        "out": options.out,
        "model": options.model,
        **measure(comparison, files, shown=options.shown),
    }


def _comparison(options: PictureEval | VideoEval, nproc: int) -> ComparingJob:
    """Checks the options and reads them into what is sampled."""
    from partsong.evals.pictures.prompts import read_prompts
    from partsong.evals.pictures.sampling import ComparingJob, ways_of
    from partsong.jobs.images import ImageJob
    from partsong.jobs.videos import VideoJob

    check_seed(options.seed)
    if is_main():
        check_files(str(Path(options.out) / "sheet.png"), options.json)
    read_arguments(options.set)
    texts = read_prompts(options.prompts, options.num, model=options.model, seed=options.seed)
    source = find_pipeline(options.model)
    if nproc > 1 and not options.strategies:
        raise ArgumentError(f"{nproc} ranks have nothing to do; add --strategies, for example ulysses")
    named = {name: place(name.split("+"), source, nproc) for name in dict.fromkeys(options.strategies)}
    shared: dict[str, Any] = {
        "folder": source.folder,
        "pipeline": source.pipeline,
        "zoo_name": source.zoo_name,
        "prompt": "",
        "arguments": call_arguments(options, source),
        "degrees": {},
        "seed": options.seed,
        "dtype": options.dtype,
        "threads": num_threads(options, source, nproc),
        "out": Path(options.out),
    }
    if isinstance(options, VideoEval):
        frames = options.frames or shared["arguments"].get("num_frames")
        base: ImageJob | VideoJob = VideoJob(**shared, fps=options.fps, num_frames=frames)
    else:
        base = ImageJob(**shared)
    return ComparingJob(
        base=base,
        prompts=_prompts(texts, source),
        texts=tuple(texts),
        ways=tuple(ways_of(named, videos=isinstance(options, VideoEval))),
        settings=_settings(base, options.model, nproc),
    )


def _prompts(texts: list[str], source: PipelineSource) -> tuple[str | int, ...]:
    """Returns the prompts, or for a pipeline of classes their numbers."""
    if source.index.get("id2label") is None:
        return tuple(texts)
    return tuple(class_number(source, text) for text in texts)


def _settings(base: Any, model: str, nproc: int) -> dict[str, Any]:
    """Returns what all samples of a folder have in common."""
    frames = getattr(base, "num_frames", None)
    given = {name: repr(value) for name, value in sorted(base.arguments.items())}
    plain = {"seed": base.seed, "dtype": base.dtype, "threads": base.threads, "nproc": nproc, "frames": frames}
    return {"model": model, "folder": str(base.folder), "pipeline": base.pipeline, **plain, **given}


def summary(result: dict[str, Any]) -> str:
    """Returns the rows as a table, which metrics are missing and why, and where the sheet is."""
    rows = result["rows"]
    # The largest difference says little beside PSNR, and is left to the JSON.
    named = [name for name in rows[0] if name != "max_abs_diff" and any(row[name] is not None for row in rows)]
    shown = [{name: _cell(name, row[name]) for name in named} for row in rows]
    lines = [table([{name: name for name in named}, *shown])]
    lines += [f"not computed: {note}" for note in result["notes"]]
    return "\n".join([*lines, f"{result['sheet']}: samples side by side; {result['out']} holds all of them"])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in _FORMS:
        return _FORMS[name](value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f}"
