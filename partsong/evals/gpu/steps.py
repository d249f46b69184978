"""The stage `steps`: steps of Flux and Wan by strategy, beside diffusers' own parallelism, on as many ranks as GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partsong.errors import RankError
from partsong.evals.bench.image import run
from partsong.evals.gpu.findings import Equipment, Finding, at_least, at_most, holds, skipped, stated

__all__ = ["steps"]

MIXES = (
    "ulysses:waves=1",
    "ulysses:waves=2",
    "ring",
    "token-ring",
    "displaced-patch:warmup_steps=1",
    "displaced-patch:warmup_steps=1,wire=int8",
    "tensor-parallel",
    "ulysses+sharded-weights",
)
#: Models at the width of the published ones, with a part of their blocks: nine copies of the whole would not fit.
MODELS = ("flux-wide", "wan-wide")
#: How far outputs may be from those of one rank, where the strategy is exact.
DRIFT = 3e-2


def steps(equipment: Equipment) -> Iterator[Finding]:
    """Times steps; on a CPU one small model with two strategies."""
    if equipment.gpus == 1:
        yield skipped("stage", "it needs 2 GPUs, found 1")
        return
    nproc = max(2, min(equipment.gpus, 8))
    asked: dict[str, Any] = {
        "nproc": nproc,
        "repeats": equipment.pick(5, 1),
        "models": equipment.pick(MODELS, ("wan-like",)),
        "tokens": equipment.pick((4096,), (64,)),
        "strategies": equipment.pick(MIXES, ("ulysses", "displaced-patch:warmup_steps=1")),
    }
    try:
        rows = run(**asked)
    except RankError as error:  # perhaps one of diffusers' own; ours are timed all the same
        yield holds("steps beside diffusers' own parallelism", False, str(error), "no error")
        rows = run(**asked, peers=False)
    for row in rows:
        name = f"{row['name']}, {row['size']} tokens, {nproc} ranks"
        yield stated(f"{name}: seconds of a step", row["seconds_median"])
        yield stated(f"{name}: times as fast as one rank", row["ratio_to_serial"])
        is_exact = not row["case"].startswith(("displaced", "serial"))
        yield at_most(f"{name}: drift", row["relative_drift"], DRIFT if is_exact else None)
    ours, theirs = (
        max((row["ratio_to_serial"] for row in rows if row["case"].startswith(begin)), default=0.0)
        for begin in (tuple(MIXES), "diffusers")
    )
    if theirs:
        yield at_least("our fastest by diffusers' fastest", ours / theirs, equipment.pick(0.95, None))
