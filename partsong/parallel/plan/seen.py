"""Remembers what a plan has seen of the calls it was attached to: shapes, steps and operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from partsong import ledger

__all__ = ["Seen", "counting_flops"]


@dataclass(slots=True)
class Seen:
    """Remembers the shapes of the last calls, which the prediction is made for.

    Attributes:
        batch: samples in one call of the denoiser, before any split.
        sample_bytes: bytes of one output sample.
        branches: calls of the denoiser per step.
        tokens: tokens per stream.
        steps: steps of this generation in which the denoiser was called; a pipeline may hold two and switch.
        latents_bytes: size of the first latents where they were shared.
        state_bytes: size of the random state where it was shared.
        decoded: samples and bytes per sample of each decoder call that was split.
        check_bytes: what the check of an inferred row sent in this generation.
        flops: floating-point operations per input shape.
    """

    batch: int = 0
    sample_bytes: int = 0
    branches: int = 1
    tokens: dict[str, int] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    latents_bytes: int = 0
    state_bytes: int = 0
    decoded: list[tuple[int, int]] = field(default_factory=list)
    check_bytes: int = 0
    flops: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def begin(self) -> None:
        """Starts a generation."""
        self.steps.clear()
        self.check_bytes = 0

    @property
    def known(self) -> bool:
        """Says whether a call has been seen."""
        return self.batch > 0

    def note_call(self, latents: Tensor | list[Tensor], sample: Tensor, branch: int) -> None:
        """Remembers the shapes of one call."""
        self.batch = len(latents)
        self.sample_bytes = sample[0].nbytes
        self.branches = 1 if branch == 0 else max(self.branches, branch + 1)


def counting_flops(
    forward: Callable[..., Any], named: dict[str, Any], known: dict[tuple[Any, ...], int], part: Any
) -> Any:
    """Calls `forward`, counting its operations once per set of shapes and part of the tokens into the active ledger."""
    key = (part, *(tuple(value.shape) for value in named.values() if isinstance(value, Tensor)))
    if key in known:
        output = forward(**named)
    else:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            output = forward(**named)
        known[key] = counter.get_total_flops()
    ledger.count(flops=known[key])
    return output
