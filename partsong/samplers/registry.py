"""The strategies by name: one line each, from which command lines, exports, tables and documents are derived."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.knobs import by_name, parse_knobs
from partsong.parallel.cfg_parallel import CfgParallel as CfgParallel
from partsong.parallel.data_parallel import DataParallel as DataParallel
from partsong.parallel.exchange.ulysses import Ulysses as Ulysses
from partsong.parallel.exchange.ring import Ring as Ring
from partsong.parallel.exchange.usp import Usp as Usp
from partsong.parallel.exchange.token_ring import TokenRing as TokenRing
from partsong.parallel.dynamic_sequence import DynamicSequence as DynamicSequence
from partsong.parallel.exchange.sync_patch import SyncPatch as SyncPatch
from partsong.parallel.exchange.displaced_patch import DisplacedPatch as DisplacedPatch
from partsong.parallel.exchange.partial_patch import PartialPatch as PartialPatch
from partsong.samplers.patch_pipeline.strategy import PatchPipeline as PatchPipeline
from partsong.parallel.clip.strategy import ClipParallel as ClipParallel
from partsong.samplers.dual_parallel.strategy import DualParallel as DualParallel
from partsong.samplers.timestep_pipeline.strategy import TimestepPipeline as TimestepPipeline
from partsong.samplers.structure_guidance.strategy import StructureGuidance as StructureGuidance
from partsong.parallel.vae.parallel_vae import ParallelVae as ParallelVae
from partsong.parallel.step_cache import StepCache as StepCache
from partsong.parallel.strategy import Strategy


#: The strategies imported above, in that order.
BUILT_IN = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Strategy) and kind is not Strategy
)
#: Strategy classes by their kebab-case name.
STRATEGIES: Mapping[str, type[Strategy]] = by_name(BUILT_IN)


def parse_strategy(text: str) -> Strategy:
    """Reads ``NAME[:key=value,...]``.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.

    Example:
        >>> parse_strategy("displaced-patch:warmup_steps=4")
        DisplacedPatch(degree=None, warmup_steps=4, order=1, norms='fresh')
    """
    return parse_knobs(text, STRATEGIES, "strategy", "strategies")
