"""Places work on ranks and moves what they need: mesh, collectives, cuts, exchanges, plans."""

from partsong.parallel.adapters import ADAPTERS, Adapter, Split
from partsong.parallel.expert_parallel.mixture import ExpertMixture
from partsong.parallel.expert_parallel.noise_expert import NoiseExpert
from partsong.parallel.plan.capture import capture
from partsong.parallel.plan.explain import Explanation
from partsong.parallel.plan.plan import Plan, parallelize
from partsong.parallel.plan.predict import Memory, predict, predict_memory
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.mesh import AXES, Axis, Mesh
from partsong.parallel.ranks.speeds import measure_shares
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.parallel.text.plan import TextPlan
from partsong.parallel.token_experts.placement import measure_placement

__all__ = [
    "ADAPTERS",
    "AXES",
    "Adapter",
    "Axis",
    "ExpertMixture",
    "Explanation",
    "Mesh",
    "NoiseExpert",
    "Plan",
    "Split",
    "Strategy",
    "TextPlan",
    "capture",
    "launch",
    "measure_placement",
    "measure_shares",
    "mesh_for",
    "parallelize",
    "Memory",
    "predict",
    "predict_memory",
]
