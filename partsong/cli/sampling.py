"""Checks, reads and reports what ``partsong image`` and ``partsong video`` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partsong.cli.arguments import read_arguments
from partsong.cli.bounds import check_files
from partsong.cli.ranks import is_main
from partsong.errors import ArgumentError, UnsupportedError
from partsong.jobs.pipeline_source import PipelineSource, encoder_bytes
from partsong.seeds import check_seed

if TYPE_CHECKING:
    from partsong.cli.option_types import Calling
    from partsong.cli.options import Image, Video

__all__ = [
    "call_arguments", "check_sampling", "comparison_lines", "job_fields", "make_result", "num_threads", "place",
    "read_shares",
]  # fmt: skip


#: Text encoders with more bytes than this are read by only one of several ranks.
LARGE_ENCODERS = 100_000_000


def check_sampling(options: Image | Video) -> None:
    """Checks what needs no model: the prompt, the seed and the files to write.

    Raises:
        ArgumentError: the prompt is empty, the seed is out of range, or a file cannot be written.
    """
    if not options.prompt.strip():
        raise ArgumentError("the prompt is empty; say what to draw")
    check_seed(options.seed)
    if is_main():
        check_files(options.out, options.json, options.ledger)


def place(texts: Sequence[str], source: PipelineSource, nproc: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Returns the strategies, and the degree of every mesh axis.

    Args:
        texts: the strategies as the user wrote them.
        source: the model.
        nproc: the number of ranks.

    Raises:
        ArgumentError: there are several ranks but no strategy, or degrees that do not fit.
        UnsupportedError: the architecture is not supported.
    """
    from partsong.parallel import ADAPTERS, mesh_for
    from partsong.samplers.registry import parse_strategy

    strategies = tuple(parse_strategy(text) for text in texts)
    if nproc > 1 and not strategies:
        raise ArgumentError(f"{nproc} ranks need to know how to share the work; add --strategy, for example ulysses")
    degrees = mesh_for(strategies, nproc)
    for kind in source.denoisers:
        if strategies and kind not in ADAPTERS:
            model = source.zoo_name or source.folder
            raise UnsupportedError(
                f"{kind} of {model} is not a supported architecture; these are: {', '.join(ADAPTERS)}"
            )
    return strategies, degrees


def job_fields(options: Image | Video, source: PipelineSource, nproc: int) -> dict[str, Any]:
    """Returns the fields that jobs of images and videos share.

    Raises:
        ArgumentError: as for `place`.
        UnsupportedError: as for `place`.
    """
    strategies, degrees = place(options.strategy, source, nproc)
    if nproc > 1 and not options.compare and encoder_bytes(source) > LARGE_ENCODERS:
        strategies = _encoding_once(strategies, source)
    return {
        "folder": source.folder,
        "pipeline": source.pipeline,
        "zoo_name": source.zoo_name,
        "prompt": options.prompt,
        "arguments": call_arguments(options, source),
        "strategies": strategies,
        "degrees": degrees,
        "shares": read_shares(options.shares, strategies, degrees, nproc),
        "seed": options.seed,
        "dtype": options.dtype,
        "threads": num_threads(options, source, nproc),
        "compare": options.compare,
        "out": Path(options.out),
        "ledger": None if options.ledger is None else Path(options.ledger),
    }


def num_threads(options: Calling, source: PipelineSource, nproc: int) -> int | None:
    """Returns the threads per rank; None leaves the choice to torch.

    The threads of several processes compete for the cores, and a zoo model is too small to need them.
    """
    return options.threads or (1 if nproc > 1 or source.zoo_name else None)


def read_shares(
    text: str | None, strategies: tuple[Any, ...], degrees: dict[str, int], nproc: int
) -> tuple[float, ...] | Literal["measured"] | None:
    """Reads the shares of the ranks.

    Raises:
        ArgumentError: they are not positive numbers, not one for each rank, or no strategy would use them.
    """
    from partsong.parallel.ranks.axes import check_shares
    from partsong.parallel.strategy import refuse_shares, useful_shares

    if text is None:
        return None
    if text == "measured":
        # Any unequal shares show whether measured ones would be used.
        if useful_shares(strategies, degrees, range(1, nproc + 1)) is None:
            raise ArgumentError(
                f"--shares measured changes nothing with {nproc} rank{'s' if nproc > 1 else ''} and the strategies "
                "given; leave it out, or use one that cuts tokens or rows, such as ulysses"
            )
        return "measured"
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"--shares {text}: use one number for each rank, such as 2,1, or measured") from None
    shares = check_shares(given, nproc)
    refuse_shares(strategies, degrees, shares)
    return shares


def _encoding_once(strategies: tuple[Any, ...], source: PipelineSource) -> tuple[Any, ...]:
    """Adds `EncodeOnce` where the pipeline can be run with it."""
    from partsong.jobs.pipelines import pipeline_class
    from partsong.samplers.registry import parse_strategy

    once = parse_strategy("encode-once")
    is_able = hasattr(pipeline_class(source.pipeline), "encode_prompt")
    return strategies if once in strategies or not is_able else (*strategies, once)


def call_arguments(options: Calling, source: PipelineSource) -> dict[str, Any]:
    """Returns the arguments of the pipeline's call: the model's defaults, then options, then ``--set``."""
    given = {
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance,
        "height": options.height,
        "width": options.width,
        "negative_prompt": options.negative_prompt,
    }
    named = {name: value for name, value in given.items() if value is not None}
    return {**source.defaults, **named, **read_arguments(options.set)}


def make_result(
    command: str, options: Image | Video, nproc: int, measured: dict[str, Any], advice: str | None
) -> dict[str, Any]:
    """Returns the result by JSON key, or an empty dictionary on ranks that measured nothing."""
    if not measured:
        return {}
    return {
        "command": command,
        "strategy": "+".join(options.strategy) or "serial",
        "nproc": nproc,
        "seed": options.seed,
        "ledger": options.ledger,
        "prompt": options.prompt,
        "model": options.model,
        "advice": advice,
        **measured,
    }


def comparison_lines(result: dict[str, Any], what: str) -> list[str]:
    """Returns lines about another size than was asked for, the serial twin, if there was one, and what the ranks sent.

    Args:
        result: by JSON key.
        what: what was sampled, ``images`` or ``frames``.
    """
    notes = result.get("size_note"), None if result["advice"] is None else f"auto: {result['advice']}"
    lines = [note for note in notes if note is not None]
    if "speedup" in result:
        apart = f"PSNR {result['psnr_to_serial']:.1f} dB, largest difference {result['max_abs_diff']:.2g}"
        lines.append(
            f"serial twin: {result['seconds_serial']:.2f} s, so {result['speedup']:.2f}x; "
            f"{apart if result['max_abs_diff'] else f'the {what} are equal to the last bit'}"
        )
    if result["nproc"] > 1:
        lines.append("sent per rank: " + ", ".join(f"{sent / 1e6:.2f} MB" for sent in result["bytes_sent"]))
    return lines
