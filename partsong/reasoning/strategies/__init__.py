"""Holds the thinking methods with many calls. Each is one async function over a `Run`."""

from partsong.reasoning.scorers.verifier import Verifier, VerifierAddress
from partsong.reasoning.strategies import registry
from partsong.reasoning.strategies.code_loop import CodePrompts
from partsong.reasoning.strategies.compute_optimal import EASY_TO_HARD
from partsong.reasoning.strategies.confidence import self_certainty
from partsong.reasoning.strategies.decompose import DecomposePrompts
from partsong.reasoning.strategies.fork_join import ForkJoinPrompts
from partsong.reasoning.strategies.groups import Judge, PrunePrompts
from partsong.reasoning.strategies.parts import Scorer
from partsong.reasoning.strategies.pdr import PdrPrompts
from partsong.reasoning.strategies.plan_search import PlanPrompts
from partsong.reasoning.strategies.prompts import Prompts
from partsong.reasoning.strategies.registry import *  # noqa: F403 - every thinking method
from partsong.reasoning.strategies.rsa import RsaPrompts
from partsong.reasoning.strategies.sequential_refinement import RefinementPrompts
from partsong.reasoning.strategies.skeleton_of_thought import SkeletonPrompts
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
    "Scorer",
    "SkeletonPrompts",
    "ProblemSplit",
    "StepScorer",
    "Trace",
    "Verifier",
    "VerifierAddress",
    "self_certainty",
]
__all__ += registry.__all__
