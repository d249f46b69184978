"""Runs ``partsong image`` with a model of picture tokens, which has rules instead of strategies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.cli.sampling import make_result
from partsong.errors import ArgumentError, UnsupportedError
from partsong.jobs.folder_source import find_tiles

if TYPE_CHECKING:
    from partsong.cli.options import Image

__all__ = ["tiles_image"]

#: Options of pipelines that do not apply to models of tokens, and what to use instead.
_OF_PIPELINES = {
    "strategy": "tokens are decided in one process; use --rule",
    "steps": "use --rule lpd:steps=N",
    "height": "the model draws 64 x 64",
    "width": "the model draws 64 x 64",
    "negative_prompt": "the model has no negative prompt",
    "set": "there is no pipeline to set anything of",
    "shares": "tokens are decided in one process",
}


def tiles_image(options: Image, nproc: int) -> dict[str, Any] | None:
    """Samples the image, if the model is one of picture tokens.

    Returns:
        The result by JSON key, or None where the model is another one.

    Raises:
        ArgumentError: the rule is unknown or not for this model, or the prompt is outside the grammar.
        UnsupportedError: an option of pipelines is given, or several ranks.
    """
    source = find_tiles(options.model)
    if source is None:
        if options.rule is not None:
            raise ArgumentError(f"--rule is for models of picture tokens, and {options.model} is a pipeline")
        return None
    from partsong.jobs.tiles import TilesJob, run_tiles
    from partsong.samplers.any_order import parse_picture_rule

    for name, instead in _OF_PIPELINES.items():
        if getattr(options, name) not in (None, ()):
            raise UnsupportedError(f"--{name.replace('_', '-')} with {options.model}: {instead}")
    if nproc > 1:
        raise UnsupportedError(f"--nproc {nproc} with {options.model}: tokens are decided in one process")
    rule = options.rule or "lpd"
    job = TilesJob(
        source=source,
        prompt=options.prompt,
        rule=parse_picture_rule(rule),
        guidance=options.guidance,
        num_images=options.num_images,
        seed=options.seed,
        dtype=options.dtype or "float32",
        threads=options.threads or 1,
        compare=options.compare,
        out=Path(options.out),
        ledger=None if options.ledger is None else Path(options.ledger),
    )
    return {**make_result("image", options, nproc, run_tiles(job), None), "rule": rule}
