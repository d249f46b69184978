"""Runs ``partsong image``: checks what needs no model, then runs the job on the ranks."""

from __future__ import annotations

from typing import Any

from partsong.cli.arguments import read_arguments
from partsong.cli.auto import settle_auto
from partsong.cli.options import Image
from partsong.cli.ranks import num_ranks, prepare_ranks, run_on_ranks
from partsong.cli.sampling import check_sampling, comparison_lines, job_fields, make_result
from partsong.cli.tiles import tiles_image
from partsong.jobs.pipeline_source import class_number, find_pipeline
from partsong.outputs import check_image_name

__all__ = ["image", "summary"]


def image(options: Image) -> dict[str, Any]:
    """Samples the image and returns the result by JSON key, or an empty dictionary on ranks other than 0."""
    _check(options)
    read_arguments(options.set)  # checked early, because fetching a model from the hub may take minutes
    if (tiles := tiles_image(options, num_ranks(options.nproc))) is not None:
        return tiles
    options, advice = settle_auto(options, batch=options.num_images)
    nproc = num_ranks(options.nproc)
    source = find_pipeline(options.model)
    prepare_ranks(nproc, "partsong.jobs.images")
    shared = job_fields(options, source, nproc)
    if source.index.get("id2label") is not None:
        shared["prompt"] = class_number(source, options.prompt)
    # Imported last because it takes seconds; everything above fails sooner.
    from partsong.jobs.images import ImageJob, run_image

    job = ImageJob(**shared, num_images=options.num_images)
    measured = run_on_ranks(run_image, nproc, job)
    return make_result("image", options, nproc, measured, advice)


def summary(result: dict[str, Any]) -> str:
    """Describes the result in two or three lines."""
    ranks = f"{result['nproc']} rank{'s' if result['nproc'] > 1 else ''}"
    how = f"{result['strategy']} on {ranks}"
    if "rule" in result:
        how = f"{result['rule']} with {result['forwards']} forwards"
    lines = [f"{result['out']}: {how}, {result['class']}, {result['seconds']:.2f} s"]
    lines += comparison_lines(result, "images")
    if result["facts_read"] is not None:
        lines.append(f"facts of the caption read back from the image: {result['facts_read']:.0%}")
    return "\n".join(lines)


def _check(options: Image) -> None:
    check_image_name(options.out)
    check_sampling(options)
