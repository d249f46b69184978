"""What ``partsong image`` and ``partsong video`` check and read alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partsong.cli.arguments import read_arguments
from partsong.cli.models import Source
from partsong.cli.ranks import is_main
from partsong.errors import ArgumentError, UnsupportedError
from partsong.outputs import check_writable
from partsong.seeds import check_seed

if TYPE_CHECKING:
    from partsong.cli.options import Image, Video

__all__ = ["call_arguments", "check_sampling", "place"]


def check_sampling(options: Image | Video, *counts: str) -> None:
    """Refuses what can be refused without a model: an empty prompt, numbers below one, files that cannot be written.

    Args:
        options: of the command.
        *counts: names of its own options that count something.
    """
    if not options.prompt.strip():
        raise ArgumentError("the prompt is empty; say what to draw")
    for name in ("steps", "height", "width", "threads", *counts):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    check_seed(options.seed)
    if is_main():
        for path in (options.out, options.json, options.ledger):
            if path is not None:
                check_writable(path)


def place(options: Image | Video, source: Source, nproc: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The strategies, and the degree of every mesh axis.

    Raises:
        ArgumentError: ranks without a strategy, or degrees that do not fit.
        UnsupportedError: an architecture that is not supported.
    """
    from partsong.parallel import ADAPTERS, mesh_for, parse_strategy

    strategies = tuple(parse_strategy(text) for text in options.strategy)
    if nproc > 1 and not strategies:
        raise ArgumentError(f"{nproc} ranks need to know how to share the work; add --strategy, for example ulysses")
    degrees = mesh_for(strategies, nproc)
    for kind in source.denoisers:
        if strategies and kind not in ADAPTERS:
            raise UnsupportedError(
                f"{kind} of {options.model} is no supported architecture; supported: {', '.join(ADAPTERS)}"
            )
    return strategies, degrees


def call_arguments(options: Image | Video, source: Source) -> dict[str, Any]:
    """Arguments of the pipeline's call: the model's defaults, then options, then ``--set``."""
    given = {
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance,
        "height": options.height,
        "width": options.width,
        "negative_prompt": options.negative_prompt,
    }
    named = {name: value for name, value in given.items() if value is not None}
    return {**source.defaults, **named, **read_arguments(options.set)}
