"""Computes attention with its log-sum-exp, exact merges, the token head and norms, in one process without ranks."""

from partsong.kernels.attend import attention
from partsong.kernels.call import Segment
from partsong.kernels.dispatch import available, force_backend
from partsong.kernels.install import Installed, install
from partsong.kernels.masks import BlockCausal, Causal, ChosenBlocks, Streams, Tree
from partsong.kernels.merge import merge
from partsong.kernels.norms import (
    adaptive_layer_norm,
    corrected_group_norm_stats,
    group_norm_apply,
    group_norm_stats,
    merge_group_norm_stats,
    residual_adaptive_layer_norm,
    rms_norm_rotary,
)
from partsong.kernels.token_head import TokenNoise, token_state, token_stats
from partsong.kernels.token_state import TokenState, TokenStats, merge_token_states

__all__ = [
    "BlockCausal",
    "ChosenBlocks",
    "Causal",
    "Installed",
    "Segment",
    "Streams",
    "TokenNoise",
    "TokenState",
    "TokenStats",
    "Tree",
    "adaptive_layer_norm",
    "attention",
    "available",
    "corrected_group_norm_stats",
    "force_backend",
    "group_norm_apply",
    "group_norm_stats",
    "install",
    "merge",
    "merge_group_norm_stats",
    "merge_token_states",
    "residual_adaptive_layer_norm",
    "rms_norm_rotary",
    "token_state",
    "token_stats",
]
