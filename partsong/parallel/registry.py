"""Strategies by name, for command lines and reports."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.knobs import by_name, parse_knobs
from partsong.parallel.cfg_parallel import CfgParallel
from partsong.parallel.clip.strategy import ClipParallel
from partsong.parallel.data_parallel import DataParallel
from partsong.parallel.dual_parallel import DualParallel
from partsong.parallel.dynamic_sequence import DynamicSequence
from partsong.parallel.exchange.displaced_patch import DisplacedPatch
from partsong.parallel.exchange.partial_patch import PartialPatch
from partsong.parallel.exchange.ring import Ring
from partsong.parallel.exchange.sync_patch import SyncPatch
from partsong.parallel.exchange.token_ring import TokenRing
from partsong.parallel.exchange.ulysses import Ulysses
from partsong.parallel.exchange.usp import Usp
from partsong.parallel.patch_pipeline import PatchPipeline
from partsong.parallel.step_cache import StepCache
from partsong.parallel.strategy import Strategy
from partsong.parallel.structure_guidance import StructureGuidance
from partsong.parallel.timestep_pipeline import TimestepPipeline
from partsong.parallel.vae.parallel_vae import ParallelVae

__all__ = ["STRATEGIES", "parse_strategy"]

_CLASSES = (
    CfgParallel,
    DataParallel,
    Ulysses,
    Ring,
    Usp,
    TokenRing,
    DynamicSequence,
    SyncPatch,
    DisplacedPatch,
    PartialPatch,
    PatchPipeline,
    ClipParallel,
    DualParallel,
    TimestepPipeline,
    StructureGuidance,
    ParallelVae,
    StepCache,
)


#: Strategy classes by their kebab-case name.
STRATEGIES: Mapping[str, type[Strategy]] = by_name(_CLASSES)


def parse_strategy(text: str) -> Strategy:
    """Reads ``NAME[:key=value,...]``.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.

    Example:
        >>> parse_strategy("displaced-patch:warmup_steps=4")
        DisplacedPatch(degree=None, warmup_steps=4)
    """
    return parse_knobs(text, STRATEGIES, "strategy strategies")
