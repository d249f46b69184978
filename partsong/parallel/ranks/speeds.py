"""Measures the relative speeds of the ranks of a mesh."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from partsong.accelerator import is_on_host, synchronize
from partsong.errors import ArgumentError
from partsong.knobs import Whole
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.mesh import AXES, Mesh

__all__ = ["measure_shares"]

#: Digits of a share; further digits are noise.
DIGITS = 2
#: Tokens and channels of the work that is measured by default.
LENGTH, WIDTH, HEADS = 512, 512, 8


def measure_shares(
    mesh: Mesh,
    work: Callable[[], object] | None = None,
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Measures the speed of every rank, for `Mesh` to cut by. All ranks call it together.

    All work at the same time, as they will later, so ranks that share a processor or a GPU slow each other down. A
    rank's time is the median of several rounds.

    Args:
        mesh: the ranks.
        work: what each rank computes by itself, such as a call of the denoiser on inputs of the usual size, without a
            plan. Default: products of matrices and attention, in the proportion of a transformer's block.
        repeats: rounds that count, after one that warms up.
        clock: returns seconds. ``time.process_time`` ignores the effect of other programs.

    Returns:
        The share of each rank, in order; the fastest has 1.

    Raises:
        ArgumentError: `repeats` is not a positive integer, or the work takes no time by this clock.

    Example:
        >>> with Mesh() as mesh:
        ...     measure_shares(mesh, repeats=1)
        (1.0,)
    """
    if not Whole(1).holds(repeats):
        raise ArgumentError(f"measure_shares: repeats={repeats!r}; use {Whole(1)}")
    compute = _block_of(mesh.device) if work is None else work
    everyone = mesh.axis(*AXES)
    taken = []
    for _ in range(repeats + 1):
        agree(everyone, [0.0], name="start of a measured round")
        taken.append(_seconds(compute, mesh.device, clock))
    seconds = [row[0] for row in agree(everyone, [statistics.median(taken[1:])], name="speeds of the ranks")]
    if min(seconds) <= 0.0:
        raise ArgumentError("measure_shares: the work takes no time by this clock; measure more work or by another one")
    # Rounding a small share must not make it 0.
    return tuple(max(round(min(seconds) / each, DIGITS), 0.1**DIGITS) for each in seconds)


def _seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    start = clock()
    with torch.no_grad():
        work()
    synchronize(device)
    return clock() - start


def _block_of(device: torch.device) -> Callable[[], object]:
    """Returns the work of a transformer's block of moderate size: four projections, attention and a feed-forward."""
    dtype = torch.float32 if is_on_host(device) else torch.bfloat16
    rows = torch.full((LENGTH, WIDTH), 0.01, dtype=dtype, device=device)
    square, wide = (torch.full((WIDTH, n * WIDTH), 0.01, dtype=dtype, device=device) for n in (1, 4))
    # A GPU finishes one block before its host has posted it.
    blocks = 4 if is_on_host(device) else 32

    def compute() -> None:
        for _ in range(blocks):
            q, k, v = ((rows @ square).view(1, LENGTH, HEADS, -1).transpose(1, 2) for _ in range(3))
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(LENGTH, WIDTH)
            torch.matmul(F.gelu(attended @ square @ wide), wide.T)

    return compute
