"""Reads the traces of published models that come with this package, so that a plan for one needs no tracing.

They are of each model at its own size, one picture or video, on GPUs, under the exact mixes for 1, 2 and 4 of them.
``python -m tests.planner.shipped`` makes them, whenever a test says that they no longer are what tracing gives.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from partsong import errors
from partsong.parallel.strategy import Strategy
from partsong.planner.calls import Size
from partsong.planner.decoding import DecoderCost
from partsong.planner.operators import OperatorWork
from partsong.planner.subject import Subject
from partsong.planner.trace import KERNEL_CHOICES, CallTrace
from partsong.planner.trace_data import TraceTable

__all__ = ["FOLDER", "ShippedTraces", "key_of", "shipped_for", "versions"]

#: Has a file for each published model.
FOLDER = Path(__file__).with_name("traces")


class ShippedTraces:
    """Holds what a file has of one model.

    Args:
        data: of the file.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._traces, self._refused = TraceTable(data), data["refused"]
        work, *numbers = data["decoding"]
        self.decoding = DecoderCost(tuple(OperatorWork(*each) for each in work), *numbers)

    def trace(self, mix: Sequence[Strategy], ranks: int, samples: int) -> CallTrace | None:
        """Returns the trace of a call; None where the file has none.

        Args:
            mix: the strategies that work on the call.
            ranks: that share it.
            samples: of the call.

        Raises:
            PartsongError: the mix has no correct form, as tracing would say.
        """
        key = key_of(mix, ranks, samples)
        if key in self._refused:
            kind, reason = self._refused[key]
            raise getattr(errors, kind)(reason)
        return self._traces.trace(key)


def key_of(mix: Sequence[Strategy], ranks: int, samples: int) -> str:
    """Returns how a file names a trace."""
    return f"{ranks} ranks, {samples} samples: {' '.join(map(repr, mix))}"


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a trace depends on, without what says for which devices torch is."""
    return {name: version(name).partition("+")[0] for name in ("torch", "diffusers")}


def shipped_for(subject: Subject, size: Size, *, fused: bool) -> ShippedTraces | None:
    """Reads the traces of a model; None where there are none for it, this size and the installed packages.

    There are none for kernels that the user has chosen, either.

    Args:
        subject: the model.
        size: of a picture or video.
        fused: whether the ranks are GPUs.
    """
    own = Size(height=subject.height, width=subject.width, frames=subject.frames, dtype=subject.dtype)
    chosen = any(name in os.environ for name in KERNEL_CHOICES)
    if subject.published is None or size != own or not fused or chosen:
        return None
    try:
        data = json.loads(lzma.decompress((FOLDER / f"{subject.published}.json.xz").read_bytes()))
    except FileNotFoundError:
        return None
    return ShippedTraces(data) if data["versions"] == versions() else None
