"""Runs in the process of a served text model: loads it, and answers the requests that come over the wire.

The process ends when its end of the wire says that the server is gone, however that happened.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

from partsong.errors import PartsongError
from partsong.foreign_messages import quiet_libraries
from partsong.serving.texts.answering import OpenedText, leave_at_once, serve_opened
from partsong.serving.texts.wire import TextSpec

__all__ = ["serve_text"]


def serve_text(spec: TextSpec, end: socket.socket) -> None:
    """Serves a model until the server closes the wire; the target of the process."""
    # Ctrl-C reaches every process of a terminal, but the server is the one to end this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if spec.nproc > 1 and _decides_in_any_order(spec):
        from partsong.serving.texts.text_ranks import serve_over_ranks

        serve_over_ranks(spec, end)
    elif serve_opened(end, lambda: _open(spec)):
        leave_at_once()


def _open(spec: TextSpec) -> OpenedText:
    """Loads the model by its kind: one that writes token after token, or one that decides tokens in any order."""
    import torch

    from partsong import zoo

    quiet_libraries("transformers")
    is_zoo = spec.model in zoo.MODELS
    if spec.threads or is_zoo:
        torch.set_num_threads(spec.threads or 1)
    if _is_causal(spec):
        from partsong.serving.texts.local_thinking import ThinkingTexts

        how: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device, "speculate": spec.speculate}
        if spec.nproc > 1:
            how |= {"nproc": spec.nproc, "share": spec.share, "threads": spec.threads}
        return ThinkingTexts(spec.model, spec.limits, spec.verifier, weights=spec.weights, **how)
    from partsong.jobs.folder_source import find_text_model
    from partsong.serving.texts.diffusion import DiffusionTexts

    source = find_text_model(spec.model, spec.adapter)
    return DiffusionTexts(source, spec)


def _decides_in_any_order(spec: TextSpec) -> bool:
    """Returns whether a model is known to do so; what cannot be read is refused where it is opened."""
    try:
        return not _is_causal(spec)
    except (PartsongError, OSError):
        return False


def _is_causal(spec: TextSpec) -> bool:
    """Returns whether a model writes one token after another."""
    from partsong.errors import UnsupportedError
    from partsong.model_folders import model_folder, read_settings
    from partsong.reasoning.local import smollm2
    from partsong.zoo import task_of

    if task_of(spec.model) is not None:
        return True  # imported here: a model that thinks does not need it
    from partsong.samplers.text.families import adapter_of

    settings = read_settings(model_folder(spec.model, others={smollm2.NAME: smollm2.folder}))
    try:
        return adapter_of(settings, spec.adapter).noise == "none"
    except UnsupportedError:
        if settings.get("mask_token_id") is not None:
            raise
        return True  # the engine knows more causal families, and refuses any other
