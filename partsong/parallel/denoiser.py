"""One denoiser under a plan: what happens around each call of it."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from partsong import ledger
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.batch import BatchSplit, GuidancePair
from partsong.parallel.collectives import agree
from partsong.parallel.explain import AGREED_STEPS, Seen, counting_flops
from partsong.parallel.hooks import AroundHook, HookSet, sample_of
from partsong.parallel.mesh import AXES
from partsong.parallel.sequence import TOKEN_AXES, SequenceParallel

if TYPE_CHECKING:
    from partsong.parallel.plan import Plan

__all__ = ["Denoiser"]


class Denoiser:
    """One transformer under a plan: the runner around its forward and the shapes it has seen."""

    def __init__(self, plan: Plan, module: nn.Module, hooks: HookSet) -> None:
        self.plan, self.module = plan, module
        self.adapter = adapter_for(module)
        self.seen = Seen()
        mesh = plan.mesh
        self.stages = plan.stages()
        self.sequence = None
        if mesh.axis(*TOKEN_AXES).size > 1:
            self.sequence = SequenceParallel(module, self.adapter, mesh, self.stages)
            self.sequence.attach(hooks)
        self.everyone = mesh.axis(*AXES)
        self.batch = BatchSplit(mesh.axis("data", "cfg"), self.adapter.batched)
        self.guidance = GuidancePair(mesh.axis("cfg"), plan.clock)
        plan.clock.on_begin(self.seen.steps.clear)
        hooks.add(module, AroundHook(self.run, inspect.signature(module.forward)), "root")

    def run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """One call of the transformer on this rank."""
        self._refuse(named)
        clock = self.plan.clock
        clock.enter(named.get("timestep"))
        if clock.step not in self.seen.steps and len(self.seen.steps) < AGREED_STEPS and self.everyone.size > 1:
            self._agree(named)
        self.seen.steps.add(clock.step)
        output = self._share(functools.partial(self._compute, forward), named)
        self.seen.note_call(named[self.adapter.sample], sample_of(output), clock.branch)
        if not clock.driven:
            self.plan.close_record()
        return output

    def _share(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        if self.batch.axis.size > 1 and named[self.adapter.sample].shape[0] > 1:
            return self.batch.run(forward, named, named[self.adapter.sample])
        if self.guidance.axis.size > 1:
            return self.guidance.run(forward, named)
        return forward(**named)

    def _compute(self, forward: Callable[..., Any], **named: Any) -> Any:
        if self.sequence is not None:
            self.sequence.begin_forward()
        active = ledger.active()
        if active is None:
            output = forward(**named)
        else:
            start, waited = time.perf_counter(), active.open_amount("seconds_waiting")
            output = counting_flops(forward, named, self.seen.flops) if active.flops else forward(**named)
            waited = active.open_amount("seconds_waiting") - waited
            active.count(forwards=1, seconds_compute=time.perf_counter() - start - waited)
        if self.sequence is not None:
            self.seen.tokens = {stream: sum(sizes) for stream, sizes in self.sequence.sizes.items()}
        return output

    def _refuse(self, named: dict[str, Any]) -> None:
        if self.sequence is None:
            return
        for name, reason in self.adapter.refused.items():
            if named.get(name) is not None:
                raise UnsupportedError(f"{self.adapter.model}: {name} was given; {reason}")

    def _agree(self, named: dict[str, Any]) -> None:
        """Refuses, on all ranks alike, a call whose inputs differ between ranks."""
        tensors = {name: named[name] for name in self.adapter.batched if isinstance(named.get(name), Tensor)}
        values = [number for tensor in tensors.values() for number in _fingerprint(tensor)]
        values += [0.0] * (4 * len(self.adapter.batched) - len(values))
        table = agree(self.everyone, values, name="comparison of the ranks' inputs")
        for rank, row in zip(self.everyone.ranks, table, strict=True):
            for position, name in enumerate(tensors):
                mine, other = table[0][4 * position :][:4], row[4 * position :][:4]
                if not _alike(mine, other):
                    raise ArgumentError(
                        f"rank {rank} was given another {name} than rank {self.everyone.ranks[0]}: make the same call "
                        "on every rank, with the same prompt, sizes and generator=torch.Generator().manual_seed(n)"
                    )


def _fingerprint(tensor: Tensor) -> list[float]:
    flat = tensor.detach().flatten().double()
    ramp = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).remainder(97)
    return [float(flat.numel()), flat.sum().item(), flat.abs().sum().item(), (flat * ramp).sum().item()]


def _alike(one: list[float], other: list[float]) -> bool:
    # Room for the rounding of a GPU's reductions, far below what another prompt or seed changes.
    slack = 1e-4 * (one[2] + 1e-12)
    return one[0] == other[0] and all(
        abs(a - b) <= slack * w for a, b, w in zip(one[1:], other[1:], (1, 1, 97), strict=True)
    )
