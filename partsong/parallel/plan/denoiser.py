"""Runs one denoiser under a plan: all that happens around each call of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from partsong import ledger
from partsong.errors import UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.cuts.batch import BatchSplit, GuidancePair
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.cuts.stacked_branches import branches_apart
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.cuts.unet import RowParallel
from partsong.parallel.hooks.arguments import AsCalled
from partsong.parallel.hooks.gradients import check_gradients, wanted_gradient
from partsong.parallel.hooks.kept_objects import refuse_loads
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, kept_arguments, signature_of
from partsong.parallel.hooks.samples import with_samples
from partsong.parallel.plan.checks import KnownLayers, check_device, check_given
from partsong.parallel.plan.neighbours import changes_layers, check_guidance_calls, check_neighbours, hook_of_a_user
from partsong.parallel.plan.seen import ModelRun, Seen, counting_flops
from partsong.parallel.plan.state import PlanState
from partsong.parallel.plan.verify import verified
from partsong.parallel.ranks.agreement import AGREED_STEPS, Comparison, check_alike
from partsong.parallel.ranks.computing import computing
from partsong.parallel.ranks.health import note_broken_off
from partsong.parallel.ranks.mesh import AXES
from partsong.parallel.ranks.ranges import named_range
from partsong.parallel.strategy import Attachment, Cut, refuse

__all__ = ["Denoiser"]

logger = logging.getLogger(__name__)


class Denoiser:
    """Runs one transformer or UNet under a plan; a `Site` for its strategies.

    Args:
        plan: the strategies and their mesh.
        module: the model.
        hooks: takes the hooks.

    Attributes:
        cut: how its input is cut over ranks; None where every rank has all of it.
        shards: the shares of its weights that ranks hold; None where each has all of them.
        seen: the shapes of its calls.
        shared: the ranks that hold parts of the same samples.
        given: the model's arguments in the current run, before they are cut.
        attachments: what strategies have put on its blocks.
        has_shares: whether this rank has only its share of the residuals, from a ControlNet that is cut too.
    """

    def __init__(self, plan: PlanState, module: nn.Module, hooks: HookSet) -> None:
        self.plan, self.module, self.hooks = plan, module, hooks
        self.clock, self.strategies, mesh = plan.clock, plan.strategies, plan.mesh
        self.adapter = adapter_for(module, plan.adapter)
        self.seen = Seen()
        self.given: Mapping[str, Any] = {}
        refuse(plan.strategies, self.adapter, mesh)
        self.stages = plan.stages(plan.clock)
        self.cut = self._cut()
        self.everyone = mesh.axis(*AXES)
        self.shared = mesh.axis(*(axis for axis in AXES if axis not in ("cfg", "data")))
        self.attachments: list[Attachment] = []
        shares = (strategy.shards(module, self.adapter, mesh, plan.lent) for strategy in plan.strategies)
        self.shards = next((each for each in shares if each is not None), None)
        check_neighbours(self)
        if self.shards is not None:
            hooks.on_remove(refuse_loads(module, self.shards.holds).remove)  # before a part of it refuses
            self.shards.attach(hooks)
        # Innermost: a cache sees this rank's cut tensors.
        attached = (strategy.attach(self, hooks) for strategy in plan.strategies)
        self.attachments = [attachment for attachment in attached if attachment is not None]
        check_neighbours(self)
        if self.cut is not None:
            self.cut.attach(hooks)
        self.checked = self.everyone.size > 1 and not self.everyone.dry
        # Numbers of samples for which a call under a row that nobody has tested agreed with that of one rank.
        self._proven: set[int] = set()
        self.comparison = Comparison(self.everyone, self.adapter.sample)
        self.batch = BatchSplit(mesh.axis("data", "cfg"), BatchRules.of(self.adapter), module)
        # Ranks that share weights over this axis gather them together, so each must make equally many calls.
        is_even = self.shards is not None and "cfg" in self.shards.axes
        sample = self.adapter.sample
        self.guidance = GuidancePair(mesh.axis("cfg"), plan.clock, sample, is_even=is_even, cut=self.cut)
        self._shapes: dict[int, tuple[Any, ...]] = {}
        self._positions: tuple[str, ...] = ()
        plan.clock.on_begin(self._begin)
        is_hooked = self.cut is not None or self.shards is not None or bool(self.attachments)
        self._layers = KnownLayers(module) if is_hooked else None
        self.has_shares = False
        hooks.add(module, AroundHook(self._call, signature_of(module)), "root")

    def _cut(self) -> Cut | None:
        plan, mesh = self.plan, self.plan.mesh
        for strategy in plan.strategies:
            own = strategy.cut(self.module, self.adapter, mesh, plan.clock)
            if own is not None:
                return own
        if mesh.axis(*TOKEN_AXES).size == 1:
            return None
        if self.adapter.rows:
            return RowParallel(self.module, self.adapter, mesh, tuple(self.stages), plan.borders(plan.clock))
        return SequenceParallel(self.module, self.adapter, mesh, self.stages)

    def note_positions(self, names: tuple[str, ...]) -> None:
        """Notes which arguments a pipeline passes by position, where a loop makes its calls with all by name."""
        self._positions = names

    def _call(self, forward: AsCalled, named: dict[str, Any]) -> Any:
        try:
            return self.run(forward, named)
        except BaseException:  # other ranks may wait for the rest of it
            note_broken_off(f"a call of {self.adapter.model} in step {self.clock.step + 1}")
            raise

    def run(self, forward: AsCalled, named: dict[str, Any]) -> Any:
        """Makes one call of the model on this rank."""
        if self.plan.loop is not None:
            self.plan.check_loop()
            compute = functools.partial(self._compute, AsCalled(forward.function, forward.names, self._positions))
            if self.plan.rounds is None:
                return compute(**named)
            return self._verified(functools.partial(self._split, compute), forward, named)
        if self.plan.blocks_gradients:
            check_gradients(self.adapter.model, [self.module], named, self.plan.blocks_gradients)
        self._refuse(named)
        if self.checked:
            check_device(self.adapter.model, named[self.adapter.sample], self.plan.mesh)
        self.plan.follow_scheduler()
        clock = self.plan.clock
        self.plan.enter(named.get(self.adapter.timestep))
        if clock.driven and (clock.step, clock.branch) == (0, 0) and self.checked:
            self.plan.share_random_state()
        if (clock.step, clock.branch) == (0, 0):
            self._check_layers()
        self._note_step(named, clock.step)
        with named_range(f"{self.adapter.model}, step {clock.step}, branch {clock.branch}"):
            share = functools.partial(self._share, functools.partial(self._compute, forward))
            output = self._verified(share, forward, named)
        self.seen.note_call(named[self.adapter.sample], output, clock.branch)
        shared = {"branches": self.guidance.computed, "was_ready": self.guidance.was_ready}
        self.seen.note_work(clock.step, clock.branch, is_split=self.splits(named), **shared)
        if not clock.driven or clock.is_followed:
            self.plan.close_record()
        return output

    def _check_layers(self) -> None:
        """Refuses changes of the layers since the hooks were put on."""
        if self._layers is not None:
            self._layers.check()
        check_neighbours(self)

    def _verified(self, shared: Callable[[dict[str, Any]], Any], forward: AsCalled, named: dict[str, Any]) -> Any:
        """Makes a call; the first ones under an inferred or a given row are compared with those of one rank."""
        total = len(named[self.adapter.sample])
        if not (self.adapter.checked and self.checked) or total in self._proven:
            return shared(named)
        alone = AsCalled(self.module, forward.names, forward.positions)
        given = (self.everyone, alone, self.adapter, self.hooks, named, shared)
        output = verified(*given, tells=not self._proven)
        gathered = 0 if self.shards is None else self.shards.check_bytes()
        self._proven.add(total)
        self.seen.check_bytes += 8 * (self.everyone.size - 1) + gathered
        return output

    def begin_call(self, named: dict[str, Any], step: int) -> None:
        """Refuses, before any work, a call of a strategy's own loop that cannot be right or differs between ranks.

        Args:
            named: the model's arguments, the same on every rank.
            step: the step they are for.
        """
        self._refuse(named)
        names = " and ".join(type(strategy).__name__ for strategy in self.strategies)
        check_guidance_calls(self.module, self.plan.guider(), names)
        for name in self.adapter.residuals:
            if named.get(name) is not None:
                raise UnsupportedError(f"{self.adapter.model}: {name} was given; run a ControlNet with Ulysses instead")
        self._note_step(named, step)

    def _note_step(self, named: dict[str, Any], step: int) -> None:
        if step in self.seen.steps:
            return
        if not self.seen.steps and self.checked:
            self._warn_of_hooks()
        if len(self.seen.steps) < AGREED_STEPS and self.checked:
            check_alike(self.everyone, {name: named.get(name) for name in self.compared})
        elif self.checked and self.plan.loop is None:
            self.comparison.check()
            self.comparison.post(named[self.adapter.sample], step)
        self.seen.steps.add(step)

    def _warn_of_hooks(self) -> None:
        """Says once that a user's forward hook does not see all there is."""
        if self.plan.warned or (hook := hook_of_a_user(self.module)) is None:
            return
        self.plan.warned = True
        logger.warning(
            "the forward hook %s of %s sees only what its own rank computes under %s, such as its tokens or samples",
            hook,
            self.adapter.model,
            " and ".join(type(strategy).__name__ for strategy in self.strategies),
        )

    def splits(self, named: Mapping[str, Any]) -> bool:
        """Says whether the samples of a call are shared out."""
        return self.batch.axis.size > 1 and len(named[self.adapter.sample]) > 1

    def _share(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        self.guidance.computed, self.guidance.was_ready = 0, False
        # What another call has computed for this one has no gradients of this one's arguments.
        is_guided = self.guidance.works and not wanted_gradient([self.module], named)
        if self.guidance.overlaps and changes_layers(self.plan.guider()):
            is_guided = False  # its calls are made when the pipeline makes them
        if is_guided and not self.splits(named):
            if not self.guidance.overlaps:
                check_guidance_calls(self.module, self.plan.guider(), "CfgParallel")
            return self.guidance.run(forward, named)
        return self._split(forward, named)

    def _split(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Makes a call on this rank's samples where there are several."""
        if not self.splits(named):
            return forward(**named)
        total = len(named[self.adapter.sample])
        with branches_apart(self.module, self.batch.rows(total), total):
            return self.batch.run(forward, named, named[self.adapter.sample])

    def _compute(self, forward: Callable[..., Any], **named: Any) -> Any:
        """Runs the model, and runs it again for samples that a strategy postponed while it skipped others."""
        runs: list[ModelRun] = []
        if self.cut is not None:
            self._note_shapes(named)
        output = self._run_once(forward, named, runs)
        for attachment in self.attachments:
            if rows := list(attachment.postponed):
                part = self._run_once(forward, self.batch.rules.cut(named, rows, len(named[self.adapter.sample])), runs)
                output = with_samples(output, part, rows)
        if runs:
            streams = {} if self.cut is None else self.cut.sizes
            tokens = {stream: sum(sizes) for stream, sizes in streams.items()}
            self.seen.note_tokens(tokens, tuple(runs), self.plan.clock.branch)
        return output

    def _run_once(self, forward: Callable[..., Any], named: dict[str, Any], runs: list[ModelRun]) -> Any:
        """Runs the model for one batch and adds a note to `runs`."""
        named = kept_arguments(named)
        if self.cut is not None:
            self.cut.begin_forward(named[self.adapter.sample])
        if self.shards is not None:
            self.shards.begin_forward(len(named[self.adapter.sample]), self.cut)
        active, self.given = ledger.active(), named
        output = forward(**named) if active is None else self._timed(active, forward, named)
        self.given = {}
        if self.cut is not None or self.shards is not None:
            notes = None if self.cut is None else self.cut.call_notes()
            sums = None if self.shards is None else self.shards.call_notes()
            runs.append(ModelRun(len(named[self.adapter.sample]), notes, sums))
        return output

    def _timed(self, active: ledger.Ledger, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Runs the model, and counts the time in which it did not wait for other ranks."""
        # A call that pauses while others run knows no time of its own; its loop counts it.
        pauses = self.cut is not None and self.cut.pauses
        with nullcontext() if pauses else computing(self.plan.mesh.device):
            output = self._counted(forward, named) if active.flops else forward(**named)
        active.count(forwards=1)
        return output

    def _counted(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Makes a call and counts its operations, again each time where they do not follow from shapes."""
        part = tuple((each.axis.index, each.axis.size) for each in (self.cut, self.shards) if each is not None)
        varies = self.adapter.mixes or bool(self.attachments) or (self.cut is not None and self.cut.varies)
        return counting_flops(forward, named, {} if varies else self.seen.flops, part)

    def _note_shapes(self, named: dict[str, Any]) -> None:
        """Notices calls whose shape changes in mid-generation, such as when a callback ends guidance."""
        clock = self.plan.clock
        shapes = tuple(value.shape for value in named.values() if isinstance(value, Tensor))
        if self._shapes.setdefault(clock.branch, shapes) != shapes and self.plan.loop is None:
            clock.change(clock.branch)
            self.seen.changed.add(clock.step)
        self._shapes[clock.branch] = shapes

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        self.comparison.abandon()
        if self.cut is not None:
            self.cut.abandon()

    def _begin(self) -> None:
        self.comparison.check()
        self.seen.begin()
        self._shapes.clear()

    def _refuse(self, named: dict[str, Any]) -> None:
        if self.cut is not None:
            refused = {name: why for name, why in self.adapter.refused.items() if not self.cut.takes(name)}
            check_given(self.adapter.model, refused, named)

    @property
    def compared(self) -> tuple[str, ...]:
        """Lists the arguments that must be the same on every rank; excludes residuals that are shared out."""
        return self.adapter.batched if self.has_shares else self.adapter.compared

    def takes_shares(self, rows: bool) -> bool:
        """Says whether it reads only this rank's share of a residual.

        Args:
            rows: whether the share is of an image's rows, rather than of tokens.
        """
        is_known = bool(self.adapter.residuals) and not self.adapter.inferred
        return is_known and type(self.cut) is (RowParallel if rows else SequenceParallel)
