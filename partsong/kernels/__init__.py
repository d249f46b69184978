"""What computes: attention with its log-sum-exp, and the exact merge of partial results. One process, no ranks."""

from partsong.kernels.attend import attention
from partsong.kernels.backends import available, force_backend
from partsong.kernels.merge import merge

__all__ = ["attention", "available", "force_backend", "merge"]
