"""Holds what the ranks of a group are started with, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["GroupSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """Says what a group serves, and where its first rank finds the server.

    Attributes:
        folder: a diffusers pipeline folder.
        pipeline: class name of the pipeline.
        zoo_name: name of the zoo model, if it is one.
        defaults: arguments of the pipeline's call that a client can override.
        dtype: type of weights and arithmetic; None takes the checkpoint's own on a GPU, float32 on a CPU.
        threads: threads per rank; None leaves the choice to torch.
        loras: adapters by the name that clients know them by: a file or folder of weights.
        max_rows: most samples in one call of the model.
        max_active: most jobs that take turns.
        memory: bytes that a rank may take; None takes its part of what is there.
        groups_here: groups like this one on the same machine.
        first_device: where this one's GPUs begin, since the groups before it take those before.
        pulse: seconds after which idle ranks show that they are there.
        sends_files: whether files travel over the line, since the ranks and the server share no folder.
        address: of the server's listener: a file of this machine, or a host and a port.
        authkey: of the server's listener.
    """

    folder: Path
    pipeline: str
    zoo_name: str | None = None
    defaults: Mapping[str, Any]
    dtype: str | None = None
    threads: int | None = None
    loras: Mapping[str, Path]
    max_rows: int = 16
    max_active: int = 16
    memory: float | None = None
    groups_here: int = 1
    first_device: int = 0
    pulse: float = 1.0
    sends_files: bool = False
    address: str | tuple[str, int]
    authkey: bytes
