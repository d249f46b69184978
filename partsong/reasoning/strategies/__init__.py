"""Holds the thinking methods with many calls. Each is one async function over a `Run`."""

from partsong.reasoning.strategies.adaptive_consistency import adaptive_consistency
from partsong.reasoning.strategies.beam_search import beam_search
from partsong.reasoning.strategies.best_of_n import best_of_n
from partsong.reasoning.strategies.code_loop import CodePrompts
from partsong.reasoning.strategies.compute_optimal import EASY_TO_HARD, compute_optimal
from partsong.reasoning.strategies.confidence import self_certainty
from partsong.reasoning.strategies.decompose import DecomposePrompts, decompose
from partsong.reasoning.strategies.deepconf import deepconf
from partsong.reasoning.strategies.deepprune import deepprune
from partsong.reasoning.strategies.dvts import dvts
from partsong.reasoning.strategies.edit_test_select import edit_test_select
from partsong.reasoning.strategies.fork_join import ForkJoinPrompts, fork_join
from partsong.reasoning.strategies.groups import Judge, PrunePrompts
from partsong.reasoning.strategies.particle_filtering import particle_filtering
from partsong.reasoning.strategies.particle_gibbs import particle_gibbs
from partsong.reasoning.strategies.parts import Scorer
from partsong.reasoning.strategies.pdr import PdrPrompts, pdr
from partsong.reasoning.strategies.plan_search import PlanPrompts, plan_search
from partsong.reasoning.strategies.prompts import Prompts
from partsong.reasoning.strategies.registry import STRATEGIES, Thinking, knobs_of, parse_thinking
from partsong.reasoning.strategies.rsa import RsaPrompts, rsa
from partsong.reasoning.strategies.self_consistency import self_consistency
from partsong.reasoning.strategies.sequential_refinement import RefinementPrompts, sequential_refinement
from partsong.reasoning.strategies.short_m import short_m
from partsong.reasoning.strategies.single import single
from partsong.reasoning.strategies.skeleton_of_thought import SkeletonPrompts, skeleton_of_thought
from partsong.reasoning.strategies.splits import ProblemSplit
from partsong.reasoning.strategies.steps import StepScorer, Trace

__all__ = [
    "CodePrompts",
    "DecomposePrompts",
    "EASY_TO_HARD",
    "ForkJoinPrompts",
    "Judge",
    "PdrPrompts",
    "PlanPrompts",
    "Prompts",
    "PrunePrompts",
    "RefinementPrompts",
    "RsaPrompts",
    "STRATEGIES",
    "Scorer",
    "SkeletonPrompts",
    "ProblemSplit",
    "StepScorer",
    "Thinking",
    "Trace",
    "adaptive_consistency",
    "beam_search",
    "best_of_n",
    "compute_optimal",
    "decompose",
    "deepconf",
    "deepprune",
    "dvts",
    "edit_test_select",
    "fork_join",
    "knobs_of",
    "parse_thinking",
    "particle_filtering",
    "particle_gibbs",
    "pdr",
    "plan_search",
    "rsa",
    "self_certainty",
    "self_consistency",
    "sequential_refinement",
    "short_m",
    "single",
    "skeleton_of_thought",
]
