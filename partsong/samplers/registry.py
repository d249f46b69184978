"""Lists the strategies by name: one row each, from which command lines, exports, tables and pages are derived."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from partsong.knobs import kebab, parse_knobs
from partsong.parallel.cfg_parallel import CfgParallel as CfgParallel
from partsong.parallel.clip.strategy import ClipParallel as ClipParallel
from partsong.parallel.context_parallel import ContextParallel as ContextParallel
from partsong.parallel.cross_attention_cache import CrossAttentionCache as CrossAttentionCache
from partsong.parallel.data_parallel import DataParallel as DataParallel
from partsong.parallel.dynamic_sequence import DynamicSequence as DynamicSequence
from partsong.parallel.encode_once import EncodeOnce as EncodeOnce
from partsong.parallel.exchange.displaced_patch import DisplacedPatch as DisplacedPatch
from partsong.parallel.exchange.partial_patch import PartialPatch as PartialPatch
from partsong.parallel.exchange.ring import Ring as Ring
from partsong.parallel.exchange.sync_patch import SyncPatch as SyncPatch
from partsong.parallel.exchange.token_ring import TokenRing as TokenRing
from partsong.parallel.exchange.ulysses import Ulysses as Ulysses
from partsong.parallel.exchange.usp import Usp as Usp
from partsong.parallel.expert_parallel.strategy import ExpertParallel as ExpertParallel
from partsong.parallel.lagged_layers import LaggedLayers as LaggedLayers
from partsong.parallel.latent_parallel.strategy import LatentParallel as LatentParallel
from partsong.parallel.layer_pipeline.strategy import LayerPipeline as LayerPipeline
from partsong.parallel.offload_weights.strategy import OffloadWeights as OffloadWeights
from partsong.parallel.packed_weights import PackedWeights as PackedWeights
from partsong.parallel.sharded_weights.strategy import ShardedWeights as ShardedWeights
from partsong.parallel.step_cache.strategy import StepCache as StepCache
from partsong.parallel.strategy import Strategy
from partsong.parallel.tensor_parallel.strategy import TensorParallel as TensorParallel
from partsong.parallel.token_experts.strategy import TokenExperts as TokenExperts
from partsong.parallel.vae.parallel_vae import ParallelVae as ParallelVae
from partsong.plugins import Registry
from partsong.samplers.cascade_pipeline.loop import cascade_pipeline
from partsong.samplers.cascade_pipeline.strategy import CascadePipeline as CascadePipeline
from partsong.samplers.dual_parallel.loop import dual_parallel
from partsong.samplers.dual_parallel.strategy import DualParallel as DualParallel
from partsong.samplers.patch_pipeline.loop import patch_pipeline
from partsong.samplers.patch_pipeline.strategy import PatchPipeline as PatchPipeline
from partsong.samplers.structure_guidance.loop import structure_guidance
from partsong.samplers.structure_guidance.strategy import StructureGuidance as StructureGuidance
from partsong.samplers.time_parallel.loop import drafted_steps, time_parallel
from partsong.samplers.time_parallel.strategy import DraftedSteps as DraftedSteps
from partsong.samplers.time_parallel.strategy import TimeParallel as TimeParallel
from partsong.samplers.timestep_pipeline.loop import timestep_pipeline
from partsong.samplers.timestep_pipeline.strategy import TimestepPipeline as TimestepPipeline


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """Describes one strategy, with its sampling loop where it needs one of its own.

    Attributes:
        strategy: its class.
        loop: samples with it: ``loop(plan, strategy, **arguments)`` returns what the pipeline returns, on every rank.
            The arguments are the pipeline's own, checked already and the same on every rank.
        stream: makes a video with it block after block: ``stream(plan, strategy, everywhere=True, journal=None,
            **arguments)`` yields what the pipeline returns for each block as soon as it is done. Without `everywhere`
            only the first rank decodes, and the others yield None. Progress is kept in the folder `journal`, from which
            a run continues; see `VideoJournal`.
        journals: whether `stream` keeps a journal.
        planned: the planner tries it on all ranks that branches of guidance and samples leave; not read of plug-ins.
    """

    strategy: type[Strategy]
    loop: Callable[..., Any] | None = None
    stream: Callable[..., Generator[Any, None, None]] | None = None
    journals: bool = True
    planned: bool = False


#: The strategies of this package, in the order of every table.
BUILT_IN = (
    StrategyRow(CfgParallel),
    StrategyRow(DataParallel),
    StrategyRow(Ulysses, planned=True),
    StrategyRow(Ring, planned=True),
    StrategyRow(Usp),
    StrategyRow(TokenRing, planned=True),
    StrategyRow(DynamicSequence),
    StrategyRow(SyncPatch, planned=True),
    StrategyRow(DisplacedPatch, planned=True),
    StrategyRow(PartialPatch, planned=True),
    StrategyRow(TensorParallel, planned=True),
    StrategyRow(ShardedWeights),
    StrategyRow(OffloadWeights),
    StrategyRow(LayerPipeline),
    StrategyRow(TokenExperts),
    StrategyRow(ContextParallel),
    StrategyRow(PatchPipeline, loop=patch_pipeline, planned=True),
    StrategyRow(LaggedLayers, planned=True),
    StrategyRow(LatentParallel),
    StrategyRow(ClipParallel, planned=True),
    StrategyRow(DualParallel, stream=dual_parallel),
    StrategyRow(TimestepPipeline, stream=timestep_pipeline),
    StrategyRow(CascadePipeline, stream=cascade_pipeline, journals=False),
    StrategyRow(TimeParallel, loop=time_parallel),
    StrategyRow(DraftedSteps, loop=drafted_steps),
    StrategyRow(ExpertParallel),
    StrategyRow(StructureGuidance, loop=structure_guidance),
    StrategyRow(ParallelVae),
    StrategyRow(EncodeOnce),
    StrategyRow(StepCache),
    StrategyRow(CrossAttentionCache),
    StrategyRow(PackedWeights),
)


def _read(thing: Any) -> StrategyRow:
    """Reads a plug-in: a strategy class, or a `StrategyRow` where it needs a loop of its own.

    Raises:
        TypeError: something else.
    """
    row = thing if isinstance(thing, StrategyRow) else StrategyRow(thing)
    if not isinstance(row.strategy, type) or not issubclass(row.strategy, Strategy):
        raise TypeError(f"{thing!r} is neither a Strategy class nor a StrategyRow")
    if row.strategy.has_loop and row.loop is None and row.stream is None:
        raise TypeError(f"{row.strategy.__name__} needs a loop of its own; offer a StrategyRow that names it")
    return row


#: The rows by the kebab-case name of their strategy, those of plug-ins last.
ROWS: Mapping[str, StrategyRow] = Registry(
    "partsong.strategies", BUILT_IN, name=lambda row: kebab(row.strategy.__name__), read=_read
)


def strategies() -> dict[str, type[Strategy]]:
    """Returns the strategy classes by their kebab-case name."""
    return {name: row.strategy for name, row in ROWS.items()}


def row_of(strategy: Strategy) -> StrategyRow:
    """Returns the row of a strategy, by its class; one that is not registered has no loop."""
    rows = (row for row in ROWS.values() if row.strategy is type(strategy))
    return next(rows, StrategyRow(type(strategy)))


def use_when(kind: type[Strategy]) -> str:
    """Returns when to use a strategy, from its docstring after "Use it when".

    Returns:
        The rest of that sentence; an empty text where a plug-in's docstring has no such sentence.

    Example:
        >>> use_when(SyncPatch)
        'a Stable Diffusion UNet has to give the same picture as on one rank'
    """
    text = " ".join((kind.__doc__ or "").split())
    return text.partition("Use it when ")[2].partition(". ")[0].rstrip(".")


def parse_strategy(text: str) -> Strategy:
    """Reads ``NAME[:key=value,...]``.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.

    Example:
        >>> parse_strategy("displaced-patch:warmup_steps=4").warmup_steps
        4
    """
    return parse_knobs(text, strategies(), "strategy", "strategies")
