"""Holds what the parts of a plan share: its strategies on their ranks, the clock, and the guard of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from partsong import ledger
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.attention_call import TOKEN_AXES, Stage
from partsong.parallel.exchange.borders import SyncBorders
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.plan.seen import Seen
from partsong.parallel.ranks.health import note_broken_off
from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.ranks.noise import share_random_state
from partsong.parallel.strategy import Borders, Kind, Strategy, combined_kind

__all__ = ["PlanState"]


class PlanState:
    """Holds strategies on a mesh, and the progress of a generation with them.

    Args:
        strategies: what is attached.
        mesh: the ranks.

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
        loop: the strategy whose own sampling loop must be used; None where the pipeline's own call samples.
        rounds: how that loop shares points of the trajectory out over ranks; None where it does not.
    """

    def __init__(self, strategies: tuple[Strategy, ...], mesh: Mesh) -> None:
        self.strategies, self.mesh = strategies, mesh
        self.kind: Kind = combined_kind(strategies)
        self.clock, self.seen = StepClock(), Seen()
        self.loop: Strategy | None = None
        self.rounds = next((rounds for s in strategies if (rounds := s.rounds(mesh)) is not None), None)
        self.scheduler: Any = None
        self.tells_end = True
        self.follow_scheduler: Callable[[], None] = lambda: None
        self.finished: list[tuple[int, ...]] = []
        self.guider: Callable[[], Any] = lambda: None
        self.is_ending = False
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

    def begin_call(self) -> None:
        """Forgets what the last call of the pipeline shared; does nothing in the middle of a call."""
        if self.clock.is_over or not self.tells_end:
            self.clock.is_over, self._is_new_call = False, True
            self.finished.clear()
            self.seen.latents.clear()
            self.seen.decoded.clear()
            self.seen.state_bytes = self.seen.check_bytes = 0

    def begin_generation(self, times: list[float] | None = None, levels: list[float] | None = None) -> None:
        """Begins a generation, or the next part of one where the pipeline's call is not over."""
        self.begin_call()
        if not self._is_new_call:
            self.end_part()
        self._is_new_call = False
        self.clock.begin(times, levels)

    def begin_check(self) -> None:
        """Notes, as a call of the pipeline begins, that the last one was broken off, if it was."""
        if not self.clock.is_over and (self.clock.step or self.clock.is_called):
            note_broken_off(f"the pipeline's last call after step {self.clock.step}")
        self.end_call()

    def end_call(self) -> None:
        """Notes that the pipeline's call is over."""
        self.clock.is_over = self.clock.step > 0 or bool(self.finished)

    def end_part(self) -> None:
        """Remembers what the steps so far have sent."""

    def share_random_state(self) -> None:
        """Gives every rank the default random state of the first."""
        before = self.seen.state_bytes if self.scheduler is not None else 0  # without a pipeline each one is a call
        self.seen.state_bytes = before + share_random_state(self.mesh.axis(*AXES), self.mesh.device)

    def begin_loop(self) -> None:
        """Begins a generation in a strategy's own loop."""
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
