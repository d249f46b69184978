"""Starts the server that ranks are forked from. Nothing here loads torch, so it can be called before anything else."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from partsong.cores import usable_cores
from partsong.left_out_libraries import left_out

__all__ = ["LEFT_OUT", "begin_early", "changed_environment", "context_with", "has_gpu_files", "threads_per_rank"]

#: What every rank imports. The hooks are those of diffusers' models, and bring most of what a pipeline needs.
_COMMON = ("partsong.parallel", "diffusers.hooks")
#: How the files begin by which programs reach a GPU: NVIDIA's, the same on small boards, AMD's, and those of WSL.
_GPU_FILES = ("nvidia", "nvhost", "nvgpu", "nvmap", "kfd", "dxg")
#: Names for a server what it does without.
LEFT_OUT = "PARTSONG_LEFT_OUT"
#: Held while a rank's variables stand in the environment of this process.
_ENVIRONMENT = threading.Lock()


def has_gpu_files() -> bool:
    """Says whether there might be a GPU that torch can use; False only where there is surely none."""
    if sys.platform != "linux":
        return True
    return any(file.name.startswith(_GPU_FILES) for file in Path("/dev").iterdir())


def context_with(modules: Sequence[str] = ()) -> Any:
    """Returns the `multiprocessing` context of the server, which imports some modules when it starts.

    Args:
        modules: what is imported beside what all ranks need.
    """
    context = multiprocessing.get_context("forkserver")
    ends = ("partsong.fork_server.first", "partsong.fork_server.last")
    context.set_forkserver_preload([ends[0], *_COMMON, *modules, ends[1]])
    return context


def begin_early(nproc: int, modules: Sequence[str] = ()) -> None:
    """Starts the server, which then imports what ranks need while this process does something else.

    Does nothing where ranks may not be forked, or where that is not sure yet: `partsong.parallel.launch` then starts
    them as it always does.

    Args:
        nproc: number of ranks that will be started.
        modules: what they will need beside what all ranks do.
    """
    if "PARTSONG_SPAWN" in os.environ or has_gpu_files():
        return
    context_with(modules)
    # Torch reads the number while it is imported; the server does without what this process does without.
    values = {"OMP_NUM_THREADS": threads_per_rank(nproc), LEFT_OUT: " ".join(left_out())}
    with changed_environment(values):
        forkserver.ensure_running()


def threads_per_rank(nproc: int) -> str:
    """Returns OMP_NUM_THREADS for each of some ranks: as it is set, or an even part of the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the length of a block; another thread that wants to waits for its end."""
    with _ENVIRONMENT:
        before = {name: os.environ[name] for name in values if name in os.environ}
        os.environ.update(values)
        try:
            yield
        finally:
            for name in set(values) - set(before):
                os.environ.pop(name, None)
            os.environ.update(before)
