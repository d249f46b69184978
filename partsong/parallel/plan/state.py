"""Holds what the parts of a plan share: its strategies on their ranks, the clock, and the guard of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from partsong import ledger
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import TOKEN_AXES, Stage
from partsong.parallel.exchange.borders import SyncBorders
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.plan.callers import Callers
from partsong.parallel.plan.seen import Seen
from partsong.parallel.ranks.health import note_broken_off
from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.ranks.noise import share_random_state
from partsong.parallel.strategy import Borders, Kind, Strategy, at_work, combined_kind

__all__ = ["PlanState"]


class PlanState:
    """Holds strategies on a mesh, and the progress of a generation with them.

    Args:
        strategies: what is attached.
        mesh: the ranks.
        adapter: a caller's row for the model; None where there is none.

    Attributes:
        kind: ``exact``, ``bounded`` or ``approximate``.
        clock: the current step and branch.
        seen: shapes of what the pipeline as a whole has moved.
        scheduler: the scheduler that drives the clock; None where none does.
        tells_end: whether the end of the pipeline's call is noticed; otherwise each generation counts as a call.
        follow_scheduler: follows the pipeline's scheduler if it was replaced.
        finished: bytes that each rank sent in every step of the finished parts of a call; a pipeline may start its
            scheduler several times in one call.
        guider: returns the guidance of a modular pipeline; None where it has none.
        is_ending: whether the pipeline's call is cleaning up.
        lent: the modules of the pipeline's other parts, some of which may be a denoiser's own.
        callers: tells calls of the pipeline from others; None where no scheduler drives the clock.
        is_undone: whether the plan was taken off for good.
        warned: whether it was said that a user's hook sees a part only.
        loop: the strategy whose own sampling loop must be used; None where the pipeline's own call samples.
        blocks_gradients: names of the strategies at work that do not pass gradients on; empty where all do.
        rounds: how that loop shares points of the trajectory out over ranks; None where it does not.
    """

    def __init__(self, strategies: tuple[Strategy, ...], mesh: Mesh, adapter: Adapter | None = None) -> None:
        self.strategies, self.mesh, self.adapter = strategies, mesh, adapter
        self.kind: Kind = combined_kind(strategies)
        self.clock, self.seen = StepClock(), Seen()
        working = [s for s in strategies if s in at_work(strategies, mesh) or (s.denoises and not s.axes)]
        blocking = (type(s).__name__ for s in working if s.denoises and not s.passes_gradients)
        self.blocks_gradients = " and ".join(blocking)
        self.loop: Strategy | None = None
        self.lent: frozenset[nn.Module] = frozenset()
        self.rounds = next((rounds for s in strategies if (rounds := s.rounds(mesh)) is not None), None)
        self.scheduler: Any = None
        self.tells_end = True
        self.follow_scheduler: Callable[[], None] = lambda: None
        self.finished: list[tuple[int, ...]] = []
        self.guider: Callable[[], Any] = lambda: None
        self.is_ending, self.is_undone = False, False
        self.warned = False
        self.callers: Callers | None = None
        self._in_loop, self._is_new_call = False, True

    def stages(self, clock: StepClock | None = None) -> list[Stage]:
        """Returns a new chain of attention stages, outermost call first; axes of one rank add none.

        Args:
            clock: tells the step and the branch of the model that attends. Default: the plan's own.
        """
        every = [stage for strategy in self.strategies for stage in strategy.stages(self.mesh, clock or self.clock)]
        chain = [stage for stage in every if stage.axis.size > 1]
        chain.sort(key=lambda stage: -AXES.index(stage.axis.name))
        if {"ring", "patch"} <= {stage.axis.name for stage in chain}:
            raise UnsupportedError("patches and a ring cannot share an attention; combine either with Ulysses")
        return chain

    def borders(self, clock: StepClock | None = None) -> Borders:
        """Returns how ranks with neighbouring rows of an image exchange border rows.

        Args:
            clock: tells the step and the branch of the model with these rows. Default: the plan's own.
        """
        axis = self.mesh.axis(*TOKEN_AXES)
        chosen = (borders for s in self.strategies if (borders := s.borders(axis, clock or self.clock)) is not None)
        return next(chosen, None) or SyncBorders(axis)

    def enter(self, timestep: Any) -> None:
        """Notes a call of a denoiser. One of another pipeline, or of a user's loop, is placed by its timestep."""
        if self.callers is not None and not self.callers.are_led() and self.callers.follow(timestep):
            self.clock.is_over = True
            self.begin_call()
            self._is_new_call = False
        self.clock.enter(timestep)

    def begin_call(self) -> None:
        """Forgets what the last call of the pipeline shared; does nothing in the middle of a call."""
        if self.clock.is_over or not self.tells_end:
            self.clock.is_over, self._is_new_call = False, True
            self.finished.clear()
            self.seen.latents.clear()
            self.seen.decoded.clear()
            self.seen.state_bytes = self.seen.check_bytes = 0

    def check_parts(self) -> None:
        """Refuses a pipeline whose denoiser was replaced; where there is no pipeline, there is nothing to refuse."""

    def begin_generation(
        self, times: list[float] | None = None, levels: list[float] | None = None, noise: list[float] | None = None
    ) -> None:
        """Begins a generation, or the next part of one where the pipeline's call is not over."""
        self.check_parts()
        self.begin_call()
        if not self._is_new_call:
            self.end_part()
        self._is_new_call = False
        self.clock.begin(times, levels, noise)

    def begin_check(self) -> None:
        """Notes, as a call of the pipeline begins, that the last one was broken off, if it was."""
        if not self.clock.is_over and (self.clock.step or self.clock.is_called):
            note_broken_off(f"the pipeline's last call after step {self.clock.step}")
        self.end_call()

    def end_call(self) -> None:
        """Notes that the pipeline's call is over."""
        if self.clock.is_followed and not self.clock.is_over:
            self.clock.advance()  # no scheduler has ended the last step
        self.clock.is_over = self.clock.step > 0 or bool(self.finished)
        self.clock.end()

    def end_part(self) -> None:
        """Remembers what the steps so far have sent."""

    def share_random_state(self) -> None:
        """Gives every rank the default random state of the first."""
        before = self.seen.state_bytes if self.scheduler is not None else 0  # without a pipeline each one is a call
        self.seen.state_bytes = before + share_random_state(self.mesh.axis(*AXES), self.mesh.device)

    def begin_loop(self) -> None:
        """Begins a generation in a strategy's own loop."""
        self.check_parts()
        self.clock.begin()
        self.seen.state_bytes = 0
        self.share_random_state()

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Lets the loop of a strategy call the model inside."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    def check_loop(self) -> None:
        """Refuses a call of the pipeline or the model that does not come from the plan's sampler."""
        if self.loop is not None and not self._in_loop:
            names = " and ".join(type(strategy).__name__ for strategy in self.strategies)
            raise ArgumentError(
                f"{names} samples with a loop of its own: use generate(plan, ...) of partsong.samplers instead of "
                "calling the pipeline"
            )

    def close_record(self) -> None:
        """Ends the ledger's record of a step."""
        active = ledger.active()
        if active is not None:
            active.step()
