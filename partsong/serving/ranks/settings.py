"""Holds the settings with which the ranks of a replica are started, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ReplicaSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """Says what a replica serves, and how its first rank reaches the server.

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
        memory: bytes that a rank may take; None takes its share of the machine.
        replicas_here: number of replicas of this model on the same machine.
        first_device: number of this replica's first GPU, after those of earlier replicas.
        pulse: seconds between two signs of life of idle ranks.
        sends_files: whether files are sent over the connection, since the ranks and the server share no folder.
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
    replicas_here: int = 1
    first_device: int = 0
    pulse: float = 1.0
    sends_files: bool = False
    address: str | tuple[str, int]
    authkey: bytes
