"""What computes: attention with its log-sum-exp, and the exact merge of partial results. One process, no ranks."""

from partsong.kernels.attend import attention
from partsong.kernels.call import Segment
from partsong.kernels.dispatch import available, force_backend
from partsong.kernels.masks import BlockCausal, Causal, Streams, Tree
from partsong.kernels.merge import merge

__all__ = ["BlockCausal", "Causal", "Segment", "Streams", "Tree", "attention", "available", "force_backend", "merge"]
