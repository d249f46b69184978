"""The strategies that every feature is tried with, the columns of docs/with.md."""

from __future__ import annotations

from partsong import (
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    DraftedSteps,
    EncodeOnce,
    LaggedLayers,
    ParallelVae,
    PartialPatch,
    PatchPipeline,
    Ring,
    ShardedWeights,
    StepCache,
    SyncPatch,
    TensorParallel,
    TimeParallel,
    TokenRing,
    Ulysses,
    Usp,
)
from partsong.parallel import Strategy

#: Approximate ones are exact at the settings here: all steps are warm-up, and nothing is left out.
GROUPS: dict[str, tuple[Strategy, ...]] = {
    "CfgParallel": (CfgParallel(),),
    "DataParallel": (DataParallel(),),
    "Ulysses": (Ulysses(),),
    "Ring": (Ring(),),
    "Usp": (Usp(ulysses_degree=1),),
    "TokenRing": (TokenRing(),),
    "SyncPatch": (SyncPatch(),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=99),),
    "PartialPatch": (PartialPatch(warmup_steps=99),),
    "TensorParallel": (TensorParallel(),),
    "ShardedWeights": (ShardedWeights(),),
    "PatchPipeline": (PatchPipeline(warmup_steps=99),),
    "LaggedLayers": (LaggedLayers(warmup_steps=99),),
    "TimeParallel": (TimeParallel(tolerance=0.0),),
    "DraftedSteps": (DraftedSteps(warmup_steps=99),),
    "StepCache": (StepCache(threshold=0.0), Ulysses()),
    "ParallelVae": (ParallelVae(),),
    "EncodeOnce": (EncodeOnce(),),
}
