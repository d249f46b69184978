"""Holds what the zoo's recipes share: ranks that average gradients, the learning rate's schedule, averaged weights.

Importing this module loads torch; only recipes import it.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

_log = logging.getLogger(__name__)

#: Optimizers, each with its peak learning rate.
Optimizers = list[tuple[torch.optim.Optimizer, float]]


class World:
    """Knows this process among the others: its rank, its device, averaged gradients, a clock that all ranks share."""

    def __init__(self, device: str) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device)
        if self.size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        else:
            torch.set_num_threads(1)

    def average(self, parameters: list[nn.Parameter]) -> None:
        """Replaces every gradient by its mean over ranks (sent as bfloat16)."""
        if self.size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1).bfloat16() for g in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad)).div_(self.size)

    def descend(self, loss: Tensor, parameters: list[nn.Parameter], optimizers: Optimizers, scale: float) -> None:
        """Makes one step of every optimizer, at `scale` times its peak learning rate."""
        # Optimizers cannot do this: one may see the parameters through views that have gradients of their own.
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        self.average(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = scale * peak
            optimizer.step()

    def minutes(self, start: float) -> float:
        """Returns the minutes since `start` on rank 0's clock, so that all ranks stop together."""
        value = torch.tensor([(time.time() - start) / 60.0], dtype=torch.float64)
        if self.size > 1:
            value = value.to(self.device if self.device.type == "cuda" else "cpu")
            dist.broadcast(value, 0)
        return float(value.item())

    def wait(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def say(self, text: str) -> None:
        """Logs on rank 0."""
        if self.rank == 0:
            _log.info("%s", text)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tells whether a device has instructions for products in bfloat16."""
    if device.type != "cpu":
        return True
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.9 tells of one such instruction only
        return torch.cpu._is_avx512_bf16_supported()
    return any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())


def mixed_precision(world: World, enabled: bool = True) -> torch.autocast:
    """Computes products in bfloat16 while it is open, unless the device is a processor that has none.

    Such a processor converts every number back and forth, and a product takes tens of times as long as in float32.
    """
    return torch.autocast(world.device.type, torch.bfloat16, enabled=enabled and multiplies_bfloat16(world.device))


def schedule(progress: float, warm: float = 0.03) -> float:
    """Returns the learning rate as a share of its peak: it warms up, then falls as a cosine to zero."""
    return min(progress / warm, 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)))


class Average:
    """Keeps an exponential moving average of a model's weights, in float32."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.count = 0

    @torch.no_grad()
    def update(self, module: nn.Module, decay: float = 0.998) -> None:
        """Moves towards the weights of `module`; the first averages are over fewer steps."""
        self.count += 1
        weight = 1.0 - min(decay, (1 + self.count) / (10 + self.count))
        torch._foreach_lerp_(list(self.module.parameters()), list(module.parameters()), weight)
