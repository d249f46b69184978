"""Runs a plan: the one call that works for every strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.samplers.patch_pipeline import patch_pipeline
from partsong.samplers.structure_guidance import structure_guidance

if TYPE_CHECKING:
    from partsong.parallel import Plan

__all__ = ["LOOPS", "generate"]

#: Samplers by the name that a strategy's `loop` has.
LOOPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"patch_pipeline": patch_pipeline, "structure_guidance": structure_guidance}
)


def generate(plan: Plan, **arguments: Any) -> Any:
    """Samples with a plan, using the loop its strategies need, and returns the pipeline's output type.

    Most strategies leave the pipeline's own loop alone: then this is ``pipe(**arguments)`` on every rank with the
    arguments checked first. The others name one of `LOOPS`.

    Args:
        plan: strategies attached to a pipeline.
        **arguments: the pipeline's own keyword arguments.

    Raises:
        ArgumentTypeError: the plan holds a bare module, or a prompt is not text.
        ArgumentError: the pipeline has no such argument, or a word is given where it takes a number or a switch.

    Example:
        >>> # plan = parallelize(pipe, Ulysses()); image = generate(plan, prompt="a red circle").images[0]
    """
    pipe = plan.target
    if not hasattr(pipe, "components"):
        raise ArgumentTypeError(
            f"generate() needs a plan on a pipeline; this one is on {type(pipe).__name__}, call that module itself"
        )
    check_arguments(type(pipe), arguments)
    check_prompt(arguments.get("prompt"))
    return pipe(**arguments) if plan.loop is None else LOOPS[plan.loop](plan, **arguments)


def check_arguments(pipeline: type, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that the pipeline's call does not have, and words where it takes a number or a switch."""
    known = inspect.signature(pipeline.__call__).parameters
    unknown = [name for name in arguments if name not in known]
    if unknown:
        legal = ", ".join(name for name in known if name != "self")
        raise ArgumentError(f"{pipeline.__name__} takes no {', '.join(unknown)}; its arguments are {legal}")
    for name, value in arguments.items():
        default = known[name].default
        if isinstance(default, int | float) and isinstance(value, str):
            wanted = "true or false" if isinstance(default, bool) else f"a number such as {default}"
            raise ArgumentError(f"{pipeline.__name__} takes {wanted} for {name}, not {value!r}")


def check_prompt(prompt: Any) -> None:
    """Refuses a prompt that is neither text nor a list of texts (None is left to the pipeline)."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ArgumentTypeError(f"a prompt is text or a list of texts, not {type(text).__name__}")
