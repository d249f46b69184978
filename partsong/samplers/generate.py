"""Runs a plan through one call that works for every strategy."""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.samplers.long_video.frame_progress import with_progress
from partsong.samplers.long_video.host_memory import trimmed
from partsong.samplers.long_video.joined_blocks import joined
from partsong.samplers.registry import ROWS, row_of

if TYPE_CHECKING:
    from partsong.parallel import Plan, Strategy

__all__ = ["can_stream", "generate", "keeps_journal", "stream"]


def generate(
    plan: Plan,
    *,
    journal: str | os.PathLike[str] | None = None,
    prompts: Mapping[int, str] | None = None,
    **arguments: Any,
) -> Any:
    """Samples with a plan, using the loop its strategies need, and returns the pipeline's output type.

    Most strategies leave the pipeline's own loop alone: then this is ``pipe(**arguments)`` on every rank with the
    arguments checked first. The others have a loop in the registry.

    Args:
        plan: strategies attached to a pipeline.
        journal: see `stream`; only for strategies that stream.
        prompts: see `stream`; only for strategies that stream.
        **arguments: the pipeline's own keyword arguments.

    Raises:
        ArgumentTypeError: the plan holds a bare module, or a prompt is not text.
        ArgumentError: the pipeline has no such argument, or gets a word where it takes a number or a boolean; or the
            plan was undone.
        UnsupportedError: a journal is asked of a strategy that keeps none, or a strategy's loop is not registered.

    Example:
        >>> # plan = parallelize(pipe, Ulysses()); image = generate(plan, prompt="a red circle").images[0]
    """
    pipe = _checked(plan, arguments, "generate")
    _check_journal(plan, journal)
    later = _later_texts(plan, prompts)
    if plan.loop is None:
        return pipe(**arguments)
    row = row_of(plan.loop)
    if row.stream is None:
        if row.loop is None:
            name = type(plan.loop).__name__
            raise UnsupportedError(
                f"{name} needs a loop of its own and none is registered for it; offer StrategyRow({name}, loop=...) by "
                "the entry point partsong.strategies"
            )
        return row.loop(plan, plan.loop, **arguments)
    dim = _frames_dim(plan, arguments)
    parts = row.stream(plan, plan.loop, everywhere=True, journal=journal, **later, **arguments)
    return joined(list(with_progress(parts, pipe, arguments.get("num_frames"), dim)), dim)


def stream(
    plan: Plan,
    *,
    journal: str | os.PathLike[str] | None = None,
    prompts: Mapping[int, str] | None = None,
    **arguments: Any,
) -> Iterator[Any]:
    """Samples a long video with a plan whose strategy makes it block after block, and yields each one when it is done.

    Memory does not grow with the length: what has been yielded is not kept. Every rank must exhaust the iterator, or
    close it at the same point as the others.

    Args:
        plan: a strategy for long videos on a video pipeline.
        journal: a folder for the run's progress, which all ranks can reach. A run that finds its own progress there
            continues from it, on any number of ranks, and yields the same frames from the first; None keeps nothing.
        prompts: texts that take over in mid-video, by the frame from which on they hold. The first block with that
            frame follows the text; what is kept of blocks before it stays as it is.
        **arguments: the pipeline's own keyword arguments, ``num_frames`` for the whole video.

    Yields:
        What the pipeline returns, with the next frames, or none yet where its autoencoder waits for more latents; None
        on all ranks but the first.

    Raises:
        UnsupportedError: the plan's strategy makes the video in one piece, or keeps no journal and one was asked for.
        ArgumentTypeError: see `generate`.
        ArgumentError: see `generate`; or the journal of another video.
        OutputError: the journal cannot be written.

    Example:
        >>> # plan = parallelize(pipe, DualParallel())
        >>> # for part in stream(plan, prompt="a red circle moves right", num_frames=161):
        >>> #     frames = part.frames[0]
    """
    pipe = _checked(plan, arguments, "stream")
    row = None if plan.loop is None else row_of(plan.loop)
    if row is None or row.stream is None:
        names = " and ".join(type(strategy).__name__ for strategy in plan.strategies)
        raise UnsupportedError(f"{names} makes the whole video at once; use generate(), or stream with {_streaming()}")
    _check_journal(plan, journal)
    # Where ranks share the decoding, all of them have to take part in it.
    shares = any(coder.decodes for coder in plan.coders)
    parts = row.stream(plan, plan.loop, everywhere=shares, journal=journal, **_later_texts(plan, prompts), **arguments)
    if shares and not plan.mesh.is_main:
        parts = _unseen(parts)
    return with_progress(trimmed(parts), pipe, arguments.get("num_frames"), _frames_dim(plan, arguments))


def _unseen(parts: Iterator[Any]) -> Generator[None, None, None]:
    """Works through the parts of a video on a rank that yields none of them."""
    for _ in parts:
        yield None


def can_stream(strategy: Strategy | None) -> bool:
    """Says whether a strategy makes a video block after block, so that `stream` can yield it and a journal keep it."""
    return strategy is not None and row_of(strategy).stream is not None


def keeps_journal(strategy: Strategy | None) -> bool:
    """Says whether a strategy makes a video block after block and can keep its progress in a journal."""
    return can_stream(strategy) and strategy is not None and row_of(strategy).journals


def _check_journal(plan: Plan, journal: Any) -> None:
    if journal is not None and not keeps_journal(plan.loop):
        names = " and ".join(row.strategy.__name__ for row in ROWS.values() if row.stream is not None and row.journals)
        raise UnsupportedError(f"only {names} keep a journal; leave it out")


def _later_texts(plan: Plan, prompts: Mapping[int, str] | None) -> dict[str, Any]:
    """Returns the later texts of a video as an argument of its loop; none where there are none."""
    if not prompts:
        return {}
    if not can_stream(plan.loop):
        raise UnsupportedError(f"prompts changes the text between the blocks of {_streaming()}; leave it out")
    for frame, text in prompts.items():
        if isinstance(frame, bool) or not isinstance(frame, int) or not isinstance(text, str):
            raise ArgumentTypeError(
                f"prompts holds texts by frame, such as {{81: 'a dog'}}, not {{{frame!r}: {text!r}}}"
            )
    return {"prompts": prompts}


def _streaming() -> str:
    return " and ".join(row.strategy.__name__ for row in ROWS.values() if row.stream is not None)


def _frames_dim(plan: Plan, arguments: Mapping[str, Any]) -> int:
    """Returns the dim of frames in an output: latents keep the model's order of dims, pictures come frame by frame."""
    frames = plan.denoisers[0].adapter.frames
    return frames.dim if frames is not None and arguments.get("output_type") == "latent" else 1


def _checked(plan: Plan, arguments: Mapping[str, Any], name: str) -> Any:
    pipe = plan.target
    if not hasattr(pipe, "components"):
        raise ArgumentTypeError(
            f"{name}() needs a plan on a pipeline; this one is on {type(pipe).__name__}, call that module itself"
        )
    plan.check_attached()
    check_arguments(type(pipe), arguments)
    check_prompt(arguments.get("prompt"))
    return pipe


def check_arguments(pipeline: type, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not have, and words where it takes a number or a switch."""
    known = inspect.signature(pipeline.__call__).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())  # a modular pipeline
    unknown = [] if takes_any else [name for name in arguments if name not in known]
    if unknown:
        legal = ", ".join(name for name in known if name != "self")
        raise ArgumentError(f"{pipeline.__name__} takes no {', '.join(unknown)}; its arguments are {legal}")
    for name, value in arguments.items():
        default = known[name].default if name in known else None
        if isinstance(default, int | float) and isinstance(value, str):
            legal = "true or false" if isinstance(default, bool) else f"a number such as {default}"
            raise ArgumentError(f"{pipeline.__name__} takes {legal} for {name}, not {value!r}")


def check_prompt(prompt: Any) -> None:
    """Refuses a prompt that is neither text nor a list of texts (None is left to the pipeline)."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ArgumentTypeError(f"a prompt is text or a list of texts, not {type(text).__name__}")
