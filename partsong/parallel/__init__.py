"""Places work on ranks and moves what they need: mesh, collectives, strategies, plans."""

from partsong.parallel.adapters import ADAPTERS, Adapter, Split
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
from partsong.parallel.plan.explain import Explanation
from partsong.parallel.plan.plan import Plan, parallelize
from partsong.parallel.plan.predict import predict
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.mesh import AXES, Axis, Mesh
from partsong.parallel.registry import STRATEGIES, parse_strategy
from partsong.parallel.step_cache import StepCache
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.parallel.structure_guidance import StructureGuidance
from partsong.parallel.timestep_pipeline import TimestepPipeline
from partsong.parallel.vae.parallel_vae import ParallelVae

__all__ = [
    "ADAPTERS",
    "AXES",
    "STRATEGIES",
    "Adapter",
    "Axis",
    "CfgParallel",
    "ClipParallel",
    "DataParallel",
    "DisplacedPatch",
    "DynamicSequence",
    "DualParallel",
    "Explanation",
    "Mesh",
    "PartialPatch",
    "ParallelVae",
    "PatchPipeline",
    "Plan",
    "Ring",
    "Split",
    "Strategy",
    "StepCache",
    "StructureGuidance",
    "SyncPatch",
    "TimestepPipeline",
    "TokenRing",
    "Ulysses",
    "Usp",
    "launch",
    "mesh_for",
    "parallelize",
    "parse_strategy",
    "predict",
]
