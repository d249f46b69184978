"""One denoiser under a plan: what happens around each call of it."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from partsong import ledger
from partsong.errors import UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.cuts.batch import BatchSplit, GuidancePair
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.cuts.unet import RowParallel
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, sample_of
from partsong.parallel.plan.explain import AGREED_STEPS, Seen, counting_flops
from partsong.parallel.plan.verify import verified
from partsong.parallel.ranks.agreement import check_alike
from partsong.parallel.ranks.mesh import AXES
from partsong.parallel.ranks.noise import share_random_state
from partsong.parallel.strategy import refuse

if TYPE_CHECKING:
    from partsong.parallel.plan.plan import Plan

__all__ = ["Denoiser"]


class Denoiser:
    """One transformer under a plan: the runner around its forward and the shapes it has seen."""

    def __init__(self, plan: Plan, module: nn.Module, hooks: HookSet) -> None:
        self.plan, self.module = plan, module
        self.adapter = adapter_for(module)
        self.seen = Seen()
        mesh = plan.mesh
        refuse(plan.strategies, self.adapter, mesh)
        self.hooks, self.verified = hooks, not self.adapter.inferred or mesh.world_size == 1
        self.stages = plan.stages()
        self.sequence: SequenceParallel | RowParallel | None = None
        own = [cut for s in plan.strategies if (cut := s.cut(module, self.adapter, mesh, plan.clock)) is not None]
        if own:
            self.sequence = own[0]
        elif mesh.axis(*TOKEN_AXES).size > 1:
            if self.adapter.rows:
                self.sequence = RowParallel(module, self.adapter, mesh, tuple(self.stages), plan.borders())
            else:
                self.sequence = SequenceParallel(module, self.adapter, mesh, self.stages)
        self.everyone = mesh.axis(*AXES)
        #: The ranks that share the call at work: all of them, or those of one guidance branch.
        self.shared = self.everyone
        # Innermost: what is cut elsewhere reaches a cache as this rank has it.
        self.caches = [cache for s in plan.strategies if (cache := s.attach(self, hooks)) is not None]
        self._of_branch = mesh.axis(*(a for a in AXES if a != "cfg")) if mesh.degrees["cfg"] > 1 else self.everyone
        if self.sequence is not None:
            self.sequence.attach(hooks)
        self.checked = self.everyone.size > 1 and not self.everyone.dry
        folded = self.adapter.frames.folded if self.adapter.frames is not None else ()
        self.batch = BatchSplit(mesh.axis("data", "cfg"), self.adapter.batched, self.adapter.residuals, folded)
        self.guidance = GuidancePair(mesh.axis("cfg"), plan.clock)
        plan.clock.on_begin(self.seen.begin)
        hooks.add(module, AroundHook(self.run, inspect.signature(module.forward)), "root")

    def run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """One call of the transformer on this rank."""
        if self.plan.loop is not None:
            self.plan.check_loop()
            return self._compute(forward, **named)
        self._refuse(named)
        clock = self.plan.clock
        clock.enter(named.get(self.adapter.timestep))
        if clock.driven and (clock.step, clock.branch) == (0, 0) and self.checked:
            self.plan.seen.state_bytes = share_random_state(self.everyone, self.plan.mesh.device)
        self._note_step(named, clock.step)
        shared = functools.partial(self._share, functools.partial(self._compute, forward))
        if self.verified:
            output = shared(named)
        else:
            output = verified(self.everyone, self.module, self.hooks, named, shared)
            self.verified, self.seen.check_bytes = True, 8 * (self.everyone.size - 1)
        self.seen.note_call(named[self.adapter.sample], sample_of(output), clock.branch)
        if not clock.driven:
            self.plan.close_record()
        return output

    def begin_call(self, named: dict[str, Any], step: int) -> None:
        """For a loop of its own: refuses a call that has no correct form, or differs between ranks, before any work.

        Args:
            named: the model's arguments, the same on every rank.
            step: the step they are for.
        """
        self._refuse(named)
        for name in self.adapter.residuals:
            if named.get(name) is not None:
                raise UnsupportedError(f"{self.adapter.model}: {name} was given; run a ControlNet with Ulysses instead")
        self._note_step(named, step)

    def _note_step(self, named: dict[str, Any], step: int) -> None:
        if step not in self.seen.steps and len(self.seen.steps) < AGREED_STEPS and self.checked:
            self._agree(named)
        self.seen.steps.add(step)

    def _share(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        is_split = self.batch.axis.size > 1 and len(named[self.adapter.sample]) > 1
        self.shared = self.everyone if is_split else self._of_branch
        if is_split:
            return self.batch.run(forward, named, named[self.adapter.sample])
        if self.guidance.axis.size > 1:
            return self.guidance.run(forward, named)
        return forward(**named)

    def _compute(self, forward: Callable[..., Any], **named: Any) -> Any:
        if self.sequence is not None:
            self.sequence.begin_forward(named[self.adapter.sample])
        active = ledger.active()
        if active is None:
            output = forward(**named)
        else:
            start, waited = time.perf_counter(), active.open_amount("seconds_waiting")
            part = None if self.sequence is None else (self.sequence.axis.index, self.sequence.axis.size)
            output = counting_flops(forward, named, self.seen.flops, part) if active.flops else forward(**named)
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
        check_alike(self.everyone, {name: named.get(name) for name in self.adapter.compared})
