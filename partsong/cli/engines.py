"""Opens the engine that ``partsong think`` and ``partsong eval reasoning`` ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partsong.cli.options import Asking
from partsong.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from partsong.reasoning.calls.engine import Engine
    from partsong.reasoning.strategies import Thinking

__all__ = ["default_model", "make_engine", "own_knobs", "zoo_task"]

#: The zoo's own model for thinking, used if nothing better is installed.
FALLBACK = "sums"


def default_model() -> str:
    """Names SmolLM2-135M-Instruct if its package is installed, and otherwise the zoo's own small model."""
    from partsong.reasoning.local import smollm2

    return smollm2.NAME if smollm2.installed() else FALLBACK


def zoo_task(options: Asking) -> Any:
    """Returns the task of a zoo model that was trained to think, or None for any other model."""
    from partsong.zoo.thinking import task_of

    return None if options.server is not None else task_of(options.model or default_model())


def own_knobs(options: Asking, thinking: Thinking) -> dict[str, Any]:
    """Returns the knobs such a model has for a strategy, such as prompts, except those that the user has set."""
    from partsong.zoo.thinking import knobs_for

    if options.server is not None:
        return {}
    return knobs_for(options.model or default_model(), thinking.name, thinking.knobs)


def make_engine(options: Asking) -> Engine:
    """Opens an engine in this process, or one that asks a server.

    Raises:
        ArgumentError: an option belongs to the other kind of engine, or the model is not there.
        UnsupportedError: a package is missing.
    """
    if options.server is not None:
        return _server(options)
    if options.endpoint != "chat":
        raise ArgumentError("--endpoint belongs to a --server; a model in this process follows its chat template")
    import torch
    from transformers.utils import logging

    from partsong import zoo
    from partsong.reasoning.local import LocalEngine

    logging.disable_progress_bar()
    model = options.model or default_model()
    threads = options.threads or (1 if model in zoo.MODELS else None)
    if threads is not None:
        torch.set_num_threads(threads)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return LocalEngine(model, dtype=dtype, device=options.device)


def _server(options: Asking) -> Engine:
    if options.model is None:
        raise ArgumentError("--server needs --model: the name under which the server has it")
    if options.dtype is not None or options.device is not None or options.threads is not None:
        raise ArgumentError("--dtype, --device and --threads are for a model in this process; leave them out")
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("--server needs the openai client: pip install 'partsong[reasoning]'") from error
    from partsong.reasoning.remote import OpenAIEngine

    return OpenAIEngine(options.model, base_url=options.server, endpoint=options.endpoint)
