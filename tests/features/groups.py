"""The strategies that every feature is tried with, the columns of docs/with.md."""

from __future__ import annotations

from partsong import (
    CrossAttentionCache,
    DataParallel,
    DisplacedPatch,
    DraftedSteps,
    LaggedLayers,
    LatentParallel,
    OffloadWeights,
    PartialPatch,
    PatchPipeline,
    StepCache,
    TimeParallel,
    Ulysses,
    Usp,
)
from partsong.parallel import Strategy
from partsong.samplers.registry import BUILT_IN

#: Strategies for few models, for videos, for texts or for CPUs, which have tests of their own.
LEFT_OUT = (
    *("TokenExperts", "ContextParallel", "DynamicSequence", "ClipParallel", "DualParallel", "TimestepPipeline"),
    *("CascadePipeline", "ExpertParallel", "StructureGuidance", "PackedWeights"),
)
#: Those that run at settings of their own. Approximate ones are exact at these: all steps are warm-up, and nothing is
#: left out.
_SET: dict[str, tuple[Strategy, ...]] = {
    "Usp": (Usp(ulysses_degree=1),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=99),),
    "PartialPatch": (PartialPatch(warmup_steps=99),),
    "PatchPipeline": (PatchPipeline(warmup_steps=99),),
    "LaggedLayers": (LaggedLayers(warmup_steps=99),),
    "LatentParallel": (LatentParallel(overlap=1.0),),
    "TimeParallel": (TimeParallel(tolerance=0.0),),
    "DraftedSteps": (DraftedSteps(warmup_steps=99),),
    "OffloadWeights": (OffloadWeights(resident=0.3, chunk_mb=0.01), DataParallel()),
    "StepCache": (StepCache(threshold=0.0), Ulysses()),
    "CrossAttentionCache": (Ulysses(), CrossAttentionCache()),
}
GROUPS: dict[str, tuple[Strategy, ...]] = {
    kind.__name__: _SET.get(kind.__name__) or (kind(),)
    for kind in (row.strategy for row in BUILT_IN)
    if kind.__name__ not in LEFT_OUT
}
