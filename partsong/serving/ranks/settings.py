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
        pulse: seconds after which idle ranks show that they are there.
        address: of the server's listener.
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
    pulse: float = 1.0
    address: str
    authkey: bytes
