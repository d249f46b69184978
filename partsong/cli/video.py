"""Runs ``partsong video``: checks what needs no model, then runs the job on the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from partsong.cli.arguments import read_arguments
from partsong.cli.auto import settle_auto
from partsong.cli.options import Video
from partsong.cli.ranks import is_main, num_ranks, prepare_ranks, run_on_ranks
from partsong.cli.sampling import check_sampling, comparison_lines, job_fields, make_result
from partsong.errors import ArgumentError
from partsong.jobs.pipeline_source import find_pipeline
from partsong.knobs import kebab
from partsong.outputs import write_json
from partsong.videos import check_video_name

__all__ = ["summary", "video"]

#: The file of a journal that holds the options of the command.
_CALL = "command.json"
#: Strategies that need a causal model, and the one of the zoo that was trained for each.
_CAUSAL = {"timestep-pipeline": "motion-causal", "cascade-pipeline": "motion-clean"}
#: Options that may differ when a run is resumed.
_ANEW = ("nproc", "shares", "out", "json", "debug", "ledger", "threads")


def video(options: Video) -> dict[str, Any]:
    """Samples the video and returns the result by JSON key, or an empty dictionary on ranks other than 0."""
    if options.resume is not None:
        options = _resumed(options)
    options = replace(options, model=options.model or _zoo_model(options))
    _check(options)
    options, advice = settle_auto(options, frames=options.frames)
    nproc = num_ranks(options.nproc)
    source = find_pipeline(options.model)
    prepare_ranks(nproc, "partsong.jobs.videos")
    shared = job_fields(options, source, nproc)
    frames = options.frames or shared["arguments"].get("num_frames")
    journal = None if options.journal is None else Path(options.journal)
    if journal is not None:
        _keep(options, journal, shared["strategies"])
    # Imported last because it takes seconds; everything above fails sooner.
    from partsong.jobs.videos import VideoJob, run_video

    measured = run_on_ranks(run_video, nproc, VideoJob(**shared, fps=options.fps, num_frames=frames, journal=journal))
    return make_result("video", options, nproc, measured, advice)


def summary(result: dict[str, Any]) -> str:
    """Describes the result in a few lines."""
    ranks = f"{result['nproc']} rank{'s' if result['nproc'] > 1 else ''}"
    lines = [
        f"{result['out']}: {result['frames']} frames, {result['strategy']} on {ranks}, {result['class']}, "
        f"{result['seconds']:.2f} s ({result['frames_per_second']:.1f} frames/s, the first after "
        f"{result['first_frame_seconds']:.2f} s)"
    ]
    if result["frames_cut"]:
        lines.append(f"the model makes no {result['frames']} frames: {result['frames_cut']} more were sampled and cut")
    lines += comparison_lines(result, "frames")
    if result["facts_read"] is not None:
        lines.append(
            f"facts of the caption read back from the video: {result['facts_read']:.0%}; identity kept in "
            f"{result['identity_kept']:.0%} of the frames"
        )
    return "\n".join(lines)


def _zoo_model(options: Video) -> str:
    """Names the zoo model that suits the strategies; some need a causal one."""
    names = (kebab(name.partition(":")[0]) for name in options.strategy)
    return next((_CAUSAL[name] for name in names if name in _CAUSAL), "motion")


def _check(options: Video) -> None:
    check_video_name(options.out)
    if not 0 < options.fps < 1000:
        raise ArgumentError(f"--fps {options.fps}: frames per second lie between 0 and 1000")
    check_sampling(options)
    read_arguments(options.set)  # checked early, because fetching a model from the hub may take minutes


def _keep(options: Video, journal: Path, strategies: tuple[Any, ...]) -> None:
    """Writes the options of the command, for ``--resume``."""
    from partsong.samplers.generate import keeps_journal

    if not any(map(keeps_journal, strategies)):
        raise ArgumentError("only dual-parallel and timestep-pipeline keep a journal; leave --journal out")
    left_out = {*_ANEW, "resume", "journal"} - {"out"}
    if is_main():
        write_json(journal / _CALL, {name: value for name, value in asdict(options).items() if name not in left_out})


def _resumed(options: Video) -> Video:
    """Returns the options of the run in a journal, with those options of this call that may differ."""
    journal = Path(str(options.resume))
    try:
        saved = json.loads((journal / _CALL).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--resume {journal}: no run can be read there ({error}); give the folder of --journal"
        ) from error
    default = {field.name: field.default for field in fields(Video)}
    given = {name for name, value in asdict(options).items() if value != default[name]} - {*_ANEW, "resume"}
    if given:
        raise ArgumentError(
            f"--resume keeps the options of the run; leave out {', '.join(sorted(given))}, or start a new run"
        )
    saved["strategy"], saved["set"] = tuple(saved["strategy"]), tuple(saved["set"])
    anew = {name: getattr(options, name) for name in _ANEW if getattr(options, name) != default[name]}
    return Video(**{**saved, **anew, "journal": str(journal), "resume": None})
