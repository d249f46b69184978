"""Finds the ranks in torchrun's environment, or starts them as processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from partsong.errors import ArgumentError
from partsong.fork_server import begin_early

__all__ = ["is_main", "num_ranks", "prepare_ranks", "refuse_torchrun", "run_on_ranks", "under_torchrun"]


def under_torchrun() -> bool:
    """Says whether torchrun has started the ranks, each of which runs this program."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_torchrun(why: str) -> None:
    """Checks that torchrun has not started this process.

    Raises:
        ArgumentError: torchrun has started it; says why that is refused.
    """
    if under_torchrun():
        raise ArgumentError(f"{why}; start it without torchrun")


def is_main() -> bool:
    """Says whether this process prints and writes files."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def num_ranks(nproc: int | None) -> int:
    """Returns the number of ranks, from ``--nproc`` or torchrun.

    Raises:
        ArgumentError: torchrun started another number of ranks.
    """
    if not under_torchrun():
        return nproc or 1
    started = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, started):
        raise ArgumentError(f"--nproc {nproc}, but torchrun started {started} ranks; leave --nproc out")
    return started


def prepare_ranks(nproc: int, module: str) -> None:
    """Starts the imports of ranks while this process still checks its options; `run_on_ranks` starts the ranks.

    Args:
        nproc: the number of ranks.
        module: the one whose function they will run.
    """
    if nproc > 1 and not under_torchrun():
        begin_early(nproc, [module])


def run_on_ranks(action: Callable[..., Any], nproc: int, *args: Any) -> Any:
    """Calls ``action(*args)`` on every rank.

    Args:
        action: a function at the top level of a module.
        nproc: the number of ranks.
        *args: values that can be sent to another process.

    Returns:
        What it returned on rank 0; under torchrun, on this rank.
    """
    if under_torchrun() or nproc == 1:
        return action(*args)
    from partsong.parallel.ranks.launch import launch

    return launch(action, nproc, *args)
