"""Runs a plan: the one call that works for every strategy."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from partsong.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from partsong.parallel import Plan

__all__ = ["generate"]


def generate(plan: Plan, **arguments: Any) -> Any:
    """Samples with a plan, using the loop its strategies need, and returns the pipeline's output type.

    The strategies so far leave the pipeline's own loop alone, so this is ``pipe(**arguments)`` on every rank with the
    arguments checked first.

    Args:
        plan: strategies attached to a pipeline.
        **arguments: the pipeline's own keyword arguments.

    Raises:
        ArgumentTypeError: the plan holds a bare module, or a prompt is not text.
        ArgumentError: the pipeline has no such argument.

    Example:
        >>> # plan = parallelize(pipe, Ulysses()); image = generate(plan, prompt="a red circle").images[0]
    """
    pipe = plan.target
    if not hasattr(pipe, "components"):
        raise ArgumentTypeError(
            f"generate() needs a plan on a pipeline; this one is on {type(pipe).__name__}, call that module itself"
        )
    known = inspect.signature(type(pipe).__call__).parameters
    unknown = [name for name in arguments if name not in known]
    if unknown:
        legal = ", ".join(name for name in known if name != "self")
        raise ArgumentError(f"{type(pipe).__name__} takes no {', '.join(unknown)}; its arguments are {legal}")
    check_prompt(arguments.get("prompt"))
    return pipe(**arguments)


def check_prompt(prompt: Any) -> None:
    """Refuses a prompt that is neither text nor a list of texts (None is left to the pipeline)."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ArgumentTypeError(f"a prompt is text or a list of texts, not {type(text).__name__}")
