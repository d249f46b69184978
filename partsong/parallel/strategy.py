"""What every strategy has in common, and how several of them share the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.ranks.mesh import AXES, check_degrees

if TYPE_CHECKING:
    from torch import nn

    from partsong.parallel.adapters import Adapter
    from partsong.parallel.attention_call import Stage
    from partsong.parallel.cached_blocks import CachedBlocks
    from partsong.parallel.cuts.tokens import SequenceParallel
    from partsong.parallel.exchange.borders import Borders
    from partsong.parallel.hooks.clock import StepClock
    from partsong.parallel.hooks.model_hooks import HookSet
    from partsong.parallel.plan.denoiser import Denoiser
    from partsong.parallel.ranks.mesh import Axis, Mesh
    from partsong.parallel.vae.autoencoder import AutoencoderParallel

__all__ = ["Kind", "Strategy", "mesh_for", "refuse"]

Kind = Literal["exact", "bounded", "approximate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A way to place the work of one model on several ranks. Fields are knobs; run-time state lives in the plan.

    Subclasses set `axes`, the mesh axes they use, outermost first, and `kind`: ``exact`` equals one rank up to
    rounding, ``bounded`` comes with a certificate, ``approximate`` drifts and equals its exact twin at a named
    setting.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = "exact"
    #: Name of the sampler this strategy needs, which `partsong.samplers.generate` knows; None is the pipeline's own.
    loop: ClassVar[str | None] = None
    #: Whether one rank needs that sampler too: it makes another picture than the pipeline's own call.
    loops_alone: ClassVar[bool] = False
    #: Whether it works on the denoiser. Others have no axis and use all ranks.
    denoises: ClassVar[bool] = True
    #: Whether it reads in a step what the step before has sent.
    reads_last_step: ClassVar[bool] = False

    def wanted(self) -> dict[str, int | None]:
        """The degree asked for on each axis; None takes what the other strategies leave."""
        degree = getattr(self, "degree", None)
        return dict.fromkeys(self.axes, degree)

    def share(self, ranks: int) -> dict[str, int]:
        """Lays `ranks` ranks out over this strategy's axes that have no degree of their own."""
        free = [axis for axis, degree in self.wanted().items() if degree is None]
        return {axis: ranks if position == 0 else 1 for position, axis in enumerate(free)}

    def attach(self, denoiser: Denoiser, hooks: HookSet) -> CachedBlocks | None:
        """Puts hooks on a denoiser's blocks, inside of those that cut; None where there are none."""
        return None

    def stages(self, mesh: Mesh, clock: StepClock) -> Sequence[Stage]:
        """The links this strategy adds to the chain of an attention over split tokens, outermost call first."""
        return ()

    def borders(self, axis: Axis, clock: StepClock) -> Borders | None:
        """How border rows and norms of an image cut into rows are exchanged; None has no wish, and they are fresh."""
        return None

    def refuses(self, adapter: Adapter) -> str | None:
        """Why this strategy has no correct form on an architecture, and what to use; None where it has one."""
        if adapter.frames is not None and adapter.frames.mixers and set(self.axes) & set(TOKEN_AXES):
            return "frames are a batch to it, not tokens of one sequence; use ClipParallel, CfgParallel or DataParallel"
        return None

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> SequenceParallel | None:
        """A cut of the model that is not one over the mesh's token axes; None where there is none."""
        return None

    def codes(self, target: Any, mesh: Mesh) -> AutoencoderParallel | None:
        """Its work on the autoencoder of a pipeline; None where it leaves that alone."""
        return None

    def stale(self) -> str | None:
        """What is old when it is read, as a line of `Plan.explain`; None where nothing is."""
        return None

    def validate(self) -> None:
        """Refuses knob values that mean nothing.

        Raises:
            ArgumentError: names the knob, the value and the legal ones.
        """
        for axis, degree in self.wanted().items():
            if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
                raise ArgumentError(f"{type(self).__name__}: the degree on axis {axis} is {degree!r}; use 1 or more")


def refuse(strategies: tuple[Strategy, ...], adapter: Adapter, mesh: Mesh) -> None:
    """Refuses strategies without a correct form on an architecture, where they have more than one rank.

    Raises:
        UnsupportedError: names the strategy and the architecture, says why and what to use.
    """
    for strategy in strategies:
        reason = strategy.refuses(adapter)
        if reason is not None and any(mesh.degrees[axis] > 1 for axis in strategy.axes):
            raise UnsupportedError(f"{type(strategy).__name__} on {adapter.model}: {reason}")


def knobs(strategy: type[Strategy]) -> dict[str, Any]:
    """The knobs of a strategy class and their defaults."""
    return {knob.name: knob.default for knob in fields(strategy)}


def mesh_for(strategies: Sequence[Strategy], world_size: int) -> dict[str, Any]:
    """The mesh degrees that give each strategy its ranks.

    At most one strategy may leave its degree open, and it takes the ranks the others leave; `CfgParallel` leaves all
    but two when another one is open too. Where a strategy uses all ranks whatever their axes, those that nobody takes
    become ``data`` ranks.

    Args:
        strategies: the strategies to compose; each axis may be used once.
        world_size: number of ranks.

    Returns:
        A degree for every axis, multiplying to `world_size`.

    Raises:
        ArgumentError: the degrees do not multiply to the number of ranks, or two strategies leave theirs open.
        UnsupportedError: two strategies want the same axis.
    """
    degrees: dict[str, int] = dict.fromkeys(AXES, 1)
    owner: dict[str, str] = {}
    open_ones: list[Strategy] = []
    for strategy in strategies:
        name = type(strategy).__name__
        if not isinstance(strategy, Strategy):
            raise ArgumentError(f"{strategy!r} is not a strategy; pass instances such as Ulysses()")
        strategy.validate()
        for axis, degree in strategy.wanted().items():
            if axis in owner:
                raise UnsupportedError(f"{name} and {owner[axis]} both use the mesh axis {axis!r}; drop one of them")
            owner[axis] = name
            degrees[axis] = degree or 1
        others = [type(other).__name__ for other in strategies if other is not strategy and other.denoises]
        if strategy.loop is not None and others:
            raise UnsupportedError(
                f"{name} has a loop of its own and does not compose with {' and '.join(others)} yet; drop one"
            )
        if None in strategy.wanted().values():
            open_ones.append(strategy)
    _fill(degrees, open_ones, world_size)
    taken = math.prod(degrees.values())
    if "data" not in owner and world_size % taken == 0 and not all(strategy.denoises for strategy in strategies):
        degrees["data"] = world_size // taken
    check_degrees(degrees, world_size)
    return degrees


def _fill(degrees: dict[str, int], open_ones: list[Strategy], world_size: int) -> None:
    if len(open_ones) > 1:
        guidance = [strategy for strategy in open_ones if strategy.axes == ("cfg",)]
        for strategy in guidance:
            if world_size % 2 == 0:
                degrees["cfg"] = 2
            open_ones = [other for other in open_ones if other is not strategy]
    if len(open_ones) > 1:
        names = " and ".join(type(strategy).__name__ for strategy in open_ones)
        raise ArgumentError(f"{names} leave their degree open; give a degree to all but one of them")
    taken = math.prod(degrees.values())
    if open_ones and world_size % taken == 0:
        degrees.update(open_ones[0].share(world_size // taken))


def combined_kind(strategies: Sequence[Strategy]) -> Kind:
    """The class of a composition: as weak as its weakest part."""
    kinds = {strategy.kind for strategy in strategies}
    return "approximate" if "approximate" in kinds else "bounded" if "bounded" in kinds else "exact"


def own_loop(strategies: Sequence[Strategy], mesh: Mesh, target: Any, denoisers: Sequence[Any]) -> str | None:
    """The sampler that the strategies need on this mesh, if it is not the pipeline's own call.

    Raises:
        UnsupportedError: such a strategy on a bare model, or on a pipeline with two denoisers.
    """
    for strategy in strategies:
        alone = all(mesh.degrees[axis] == 1 for axis in strategy.axes)
        if strategy.loop is None or (alone and not strategy.loops_alone):
            continue
        name = type(strategy).__name__
        if not hasattr(target, "components") or not hasattr(target, "scheduler"):
            raise UnsupportedError(f"{name} runs the sampling loop itself: give it a pipeline with a scheduler")
        if len(denoisers) > 1:
            raise UnsupportedError(f"{name} knows one denoiser; {type(target).__name__} holds {len(denoisers)}")
        return strategy.loop
    return None
