"""Places work on ranks and moves what they need: mesh, collectives, strategies, plans."""

from partsong.parallel.adapters import ADAPTERS, Adapter, Split
from partsong.parallel.cfg_parallel import CfgParallel
from partsong.parallel.data_parallel import DataParallel
from partsong.parallel.displaced_patch import DisplacedPatch
from partsong.parallel.explain import Explanation
from partsong.parallel.launch import launch
from partsong.parallel.mesh import AXES, Axis, Mesh
from partsong.parallel.plan import Plan, parallelize
from partsong.parallel.registry import STRATEGIES, parse_strategy
from partsong.parallel.ring import Ring
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.parallel.ulysses import Ulysses
from partsong.parallel.usp import Usp

__all__ = [
    "ADAPTERS",
    "AXES",
    "STRATEGIES",
    "Adapter",
    "Axis",
    "CfgParallel",
    "DataParallel",
    "DisplacedPatch",
    "Explanation",
    "Mesh",
    "Plan",
    "Ring",
    "Split",
    "Strategy",
    "Ulysses",
    "Usp",
    "launch",
    "mesh_for",
    "parallelize",
    "parse_strategy",
]
