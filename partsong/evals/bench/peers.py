"""Makes diffusers' own parallelism run on a CPU, so that it can be timed in the same table.

Only two functions and a list are replaced. Without accelerators ``torch.accelerator.device_count()`` is 0, and
diffusers divides by it. The native attention of diffusers returns no log-sum-exp, which its ring needs. Its tensor
parallelism lists the devices that it was tried on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["diffusers_ring", "diffusers_ulysses", "cpu_shims"]


def diffusers_ulysses(module: nn.Module, degree: int) -> None:
    """Turns on diffusers' Ulysses; it cannot be turned off again."""
    _enable(module, ulysses_degree=degree)


def diffusers_ring(module: nn.Module, degree: int) -> None:
    """Turns on diffusers' ring, which gathers all keys and values and then loops over them."""
    _enable(module, ring_degree=degree)


def diffusers_tensor(module: nn.Module, degree: int) -> None:
    """Turns on diffusers' tensor parallelism, which replaces the module's weights by shares."""
    from diffusers import TensorParallelConfig
    from diffusers.hooks import tensor_parallel
    from torch.distributed.device_mesh import init_device_mesh

    config = TensorParallelConfig(mesh=init_device_mesh(_device_of(module), (degree,), mesh_dim_names=("tp",)))
    devices = tensor_parallel._SUPPORTED_TP_DEVICES
    tensor_parallel._SUPPORTED_TP_DEVICES = (*devices, "cpu")
    try:
        module.enable_parallelism(config=config)  # type: ignore[operator]
    finally:
        tensor_parallel._SUPPORTED_TP_DEVICES = devices


def _device_of(module: nn.Module) -> str:
    return next(module.parameters()).device.type


def _enable(module: nn.Module, **degrees: int) -> None:
    from diffusers import ContextParallelConfig

    with cpu_shims(_device_of(module)):
        module.enable_parallelism(config=ContextParallelConfig(**degrees))  # type: ignore[operator]


@contextmanager
def cpu_shims(device: str = "cpu") -> Iterator[None]:
    """Replaces both functions within a block, where ranks compute on CPUs."""
    from diffusers.models import attention_dispatch

    if device != "cpu":
        yield
        return
    count, native = torch.accelerator.device_count, attention_dispatch._native_attention_forward_op
    if count() == 0:
        torch.accelerator.device_count = lambda: 1
    attention_dispatch._native_attention_forward_op = _with_log_sum_exp(native)
    try:
        yield
    finally:
        torch.accelerator.device_count, attention_dispatch._native_attention_forward_op = count, native


def _with_log_sum_exp(native: Any) -> Any:
    def forward(ctx: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        needs_lse = kwargs.pop("return_lse", False) or (len(args) > 5 and args[5])
        if not needs_lse:
            return native(ctx, query, key, value, *args, **kwargs)
        q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out.permute(0, 2, 1, 3), lse.permute(0, 2, 1)

    return forward
