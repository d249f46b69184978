"""Loads pipelines of diffusers for the jobs that sample with them."""

from __future__ import annotations

import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from partsong.errors import ArgumentError, PartsongError, UnsupportedError

__all__ = ["RANK_TIMEOUT", "load_pipeline", "pipeline_class", "quiet_libraries"]

#: Seconds a rank may wait for another, since the serial twin runs alone and a large model loads slowly.
RANK_TIMEOUT = 3600.0


def load_pipeline(folder: Path, pipeline: str, dtype: str = "float32") -> Any:
    """Loads a pipeline folder, from safetensors only and without code from the folder or the network.

    Args:
        folder: a diffusers pipeline folder.
        pipeline: class name of the pipeline, one of diffusers' own.
        dtype: name of a torch floating-point type.

    Raises:
        ArgumentError: diffusers cannot read the folder; says why.
        UnsupportedError: this diffusers has no such pipeline.
    """
    kind = pipeline_class(pipeline)
    try:
        with warnings.catch_warnings():
            # Newer versions of diffusers call it dtype, but the oldest supported one knows only torch_dtype.
            warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
            return kind.from_pretrained(
                folder, torch_dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
            )
    except PartsongError:
        raise
    except Exception as error:
        raise ArgumentError(f"the model folder {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def pipeline_class(name: str) -> Any:
    """Returns the class of diffusers that a folder names.

    Raises:
        UnsupportedError: this diffusers has no such pipeline.
    """
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise UnsupportedError(
            f"the folder asks for the pipeline {name!r}, which diffusers {diffusers.__version__} does not have; "
            "upgrade diffusers (pipelines that bring their own code are not run)"
        )
    return kind


def quiet_libraries() -> None:
    """Turns off the messages and progress bars of diffusers and transformers; a job reports its progress itself."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    # tqdm's own lock is shared between processes, and Python reports it as leaked when a failing rank exits at once.
    tqdm.set_lock(threading.RLock())
