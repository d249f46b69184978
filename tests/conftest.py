"""Before anything imports triton: kernels run in its interpreter here, there may be no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
