"""Runs the ControlNets of a pipeline on this rank's share of the tokens or rows, like its denoiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.control import control_adapter_for
from partsong.parallel.cuts.row_blocks import UNET_ADVICE, UNET_BLOCKS, farthest_reach, refuse_unknown
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.cuts.unet import RowParallel
from partsong.parallel.hooks.clock import SideClock
from partsong.parallel.hooks.gradients import check_gradients
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.plan.checks import KnownLayers, check_device, check_given
from partsong.parallel.plan.denoiser import Denoiser
from partsong.parallel.plan.state import PlanState
from partsong.parallel.ranks.agreement import AGREED_STEPS, check_alike
from partsong.parallel.ranks.mesh import AXES

__all__ = ["ControlCall", "ControlNet", "cut_controlnets", "single_parts"]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """Describes one call of a ControlNet.

    Attributes:
        batch: samples in it.
        tokens: tokens per stream.
        notes: what else its bytes depend on (see `Cut.call_notes`).
        begins: nothing of an earlier step fits it, so it reads nothing stale.
        is_compared: the ranks compared their arguments.
    """

    batch: int
    tokens: Mapping[str, int]
    notes: Any
    begins: bool
    is_compared: bool


class ControlNet:
    """Runs one ControlNet under a plan.

    A call returns residuals of full size, with zeros in place of the other ranks' shares. So they may be scaled and
    added to those of another ControlNet, and the denoiser cuts them like any residual.

    Args:
        plan: the strategies and their mesh.
        module: the ControlNet.
        adapter: its row.
        hooks: takes the hooks.

    Attributes:
        stages: attention stages of its own, since they keep state from step to step.
        cut: how its input is cut over ranks.
        calls: its calls in each step of this generation.
    """

    def __init__(self, plan: PlanState, module: nn.Module, adapter: Adapter, hooks: HookSet) -> None:
        self.plan, self.module, self.adapter = plan, module, adapter
        self.clock = SideClock(plan.clock)
        self.stages = plan.stages(self.clock)
        self.cut = self._cut()
        self.cut.attach(hooks)
        self.everyone = plan.mesh.axis(*AXES)
        self.calls: dict[int, list[ControlCall]] = {}
        self._shapes: dict[int, tuple[Any, ...]] = {}
        self._layers = KnownLayers(module)
        plan.clock.on_begin(self._begin)
        hooks.add(module, AroundHook(self.run, signature_of(module)), "root")

    def _cut(self) -> SequenceParallel | RowParallel:
        mesh = self.plan.mesh
        if self.adapter.rows:
            borders = self.plan.borders(self.clock)
            return RowParallel(self.module, self.adapter, mesh, tuple(self.stages), borders)
        return SequenceParallel(self.module, self.adapter, mesh, self.stages)

    def run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Makes one call on this rank; returns the ControlNet's output, filled up with zeros."""
        sample = named[self.adapter.sample]
        check_given(self.adapter.model, self.adapter.refused, named)
        if self.plan.blocks_gradients:
            check_gradients(self.adapter.model, [self.module], named, self.plan.blocks_gradients)
        check_device(self.adapter.model, sample, self.plan.mesh)
        self._layers.check()
        self.plan.follow_scheduler()
        self._check_caller()
        self.clock.enter()
        step, begins = self.clock.step, self._begins(named)
        is_compared = step in [*self.calls, step][:AGREED_STEPS]
        if is_compared:
            check_alike(self.everyone, {name: named.get(name) for name in self.adapter.compared})
        self.cut.begin_forward(sample)
        output = forward(**named)
        tokens = {stream: sum(sizes) for stream, sizes in self.cut.sizes.items()}
        call = ControlCall(len(sample), tokens, self.cut.call_notes(), begins, is_compared)
        self.calls.setdefault(step, []).append(call)
        return tree_map(lambda part: self.cut.spread(part) if isinstance(part, Tensor) else part, output)

    def _check_caller(self) -> None:
        """Refuses calls whose step is not known, where they would read what another picture's steps have sent."""
        callers, names = self.plan.callers, [type(s).__name__ for s in self.plan.strategies if s.reads_last_step]
        if names and callers is not None and not callers.are_led():
            raise UnsupportedError(
                f"{self.adapter.model}: called by another pipeline than the one under the plan, or by a loop with a "
                f"scheduler of its own, whose steps {' and '.join(names)} does not know; parallelize that pipeline, or "
                "use Ulysses"
            )

    def _begins(self, named: dict[str, Any]) -> bool:
        """Says whether a call is the first at its place in a step, or differs in shape from the previous one."""
        branch = self.clock.branch
        shapes = tuple(value.shape for value in named.values() if isinstance(value, Tensor))
        before, self._shapes[branch] = self._shapes.get(branch), shapes
        if before is not None and before != shapes:
            self.clock.change(branch)
        return before != shapes

    def calls_of(self, step: int) -> Sequence[ControlCall]:
        """Lists the calls of a step; calls of a future step are assumed to be like the last ones."""
        if step in self.calls or step < max(self.calls, default=step + 1):
            return self.calls.get(step, ())
        last = max(self.calls)
        is_compared = len(self.calls) + step - last <= AGREED_STEPS
        return [replace(call, begins=False, is_compared=is_compared) for call in self.calls[last]]

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        self.cut.abandon()

    def _begin(self) -> None:
        self.calls.clear()
        self._shapes.clear()


def cut_controlnets(
    plan: PlanState, parts: Mapping[str, Any], denoisers: Sequence[Denoiser], hooks: HookSet
) -> list[ControlNet]:
    """Cuts the ControlNets of a pipeline like its denoisers; those that cannot be cut stay whole.

    Args:
        plan: the strategies and their mesh.
        parts: the components of the pipeline.
        denoisers: its denoisers, hooked.
        hooks: takes the hooks.
    """
    taken: list[ControlNet] = []
    others = {module for denoiser in denoisers for module in denoiser.module.modules()}
    for net in single_parts(parts):
        adapter = control_adapter_for(net)
        # A ControlNet that shares layers with the denoiser or another ControlNet needs them without hooks.
        if adapter is None or not others.isdisjoint(net.modules()):
            continue
        if all(denoiser.takes_shares(adapter.rows) for denoiser in denoisers) and _has_known_rows(net, adapter):
            if adapter.rows and plan.mesh.shares and not _reaches_alike(net, denoisers):
                continue
            taken.append(ControlNet(plan, net, adapter, hooks))
            others.update(net.modules())
    return taken


def _has_known_rows(net: nn.Module, adapter: Adapter) -> bool:
    """Says whether every layer of a ControlNet can be cut into rows, if it is cut into rows."""
    try:
        if adapter.rows:
            refuse_unknown(net, UNET_BLOCKS, UNET_ADVICE)
    except UnsupportedError:
        return False
    return True


def _reaches_alike(net: nn.Module, denoisers: Sequence[Denoiser]) -> bool:
    """Says whether shares cut a ControlNet in the same places as its denoisers: a rank's fewest rows are equal."""
    return {farthest_reach(net)} == {farthest_reach(denoiser.module) for denoiser in denoisers}


def single_parts(parts: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Yields the models of a pipeline, each once; a wrapper of several ControlNets yields them one by one."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    yield from dict.fromkeys(model for part in models for model in getattr(part, "nets", [part]))
