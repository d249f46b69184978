"""Defines the base of every strategy, and the protocols of what a strategy may add to a plan.

The engine in `plan` knows these names only. The strategies themselves are listed in `samplers.registry`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import check_fields
from partsong.parallel.adapters import Adapter
from partsong.parallel.attention_call import TOKEN_AXES, Stage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import Attachment, Borders, Coder, Cut, Ghosts, Rounds, Shards, Statistics, TextShards
from partsong.parallel.ranks.axes import AXES, shares_along
from partsong.parallel.ranks.mesh import Axis, Mesh, check_degrees

__all__ = [
    "Attachment",
    "Borders",
    "Coder",
    "Cut",
    "Ghosts",
    "Kind",
    "Rounds",
    "Shards",
    "Site",
    "Statistics",
    "Strategy",
    "at_work",
    "check_strategies",
    "combined_kind",
    "mesh_for",
    "own_loop",
    "refuse",
    "refuse_shares",
    "useful_shares",
]

Kind = Literal["exact", "bounded", "approximate"]


class Site(Protocol):
    """Describes where a strategy attaches its hooks: one denoiser under a plan.

    Attributes:
        module: the denoiser.
        adapter: its row.
        clock: progress of the generation.
        strategies: all strategies of the plan.
        shared: the ranks that share the current call.
        cut: how its input is cut over ranks; None where every rank has all of it.
        given: the model's arguments in the current run, before they are cut.
    """

    module: nn.Module
    adapter: Adapter
    clock: StepClock
    strategies: tuple[Strategy, ...]
    shared: Axis
    cut: Cut | None
    given: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Places the work of one model on several ranks. Fields are knobs; run-time state lives in the plan.

    Subclasses set `axes`, the mesh axes they use, outermost first, and `kind`: ``exact`` equals one rank up to
    rounding, ``bounded`` comes with a certificate, ``approximate`` drifts and equals its exact twin at a named
    setting. Bounds of knobs stand in their annotations (see `partsong.knobs`).
    """

    axes: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = "exact"
    #: Whether it needs a sampling loop of its own, which the registry names.
    has_loop: ClassVar[bool] = False
    #: Whether one rank needs that loop too: it makes another picture than the pipeline's own call.
    loops_alone: ClassVar[bool] = False
    #: Whether it works on the denoiser.
    denoises: ClassVar[bool] = True
    #: Whether it uses all ranks, whatever their axes.
    uses_all_ranks: ClassVar[bool] = False
    #: Whether ranks hold shares of the denoiser's weights.
    cuts_weights: ClassVar[bool] = False
    #: Whether weights of the denoiser wait in the host's memory.
    offloads: ClassVar[bool] = False
    #: Mesh axes along which it cuts by the shares of ranks, if the mesh has shares; along others in equal parts.
    uneven_axes: ClassVar[tuple[str, ...]] = ()
    #: Whether a step reads what the previous step sent.
    reads_last_step: ClassVar[bool] = False
    #: Whether the model computes other parts of its input from one step to the next, or several in one call.
    changes_parts: ClassVar[bool] = False
    #: Whether it computes the calls of a step, for branches of guidance, before the pipeline makes them.
    expects_calls: ClassVar[bool] = False
    #: Whether its ranks hold runs of blocks, so that it needs all blocks to be traced.
    cuts_blocks: ClassVar[bool] = False
    #: Whether every layer returns what it would without it, so that it runs beside any strategy without a loop.
    keeps_layers: ClassVar[bool] = False
    #: Whether inputs and weights get the gradients of one rank, where every rank computes the same loss.
    passes_gradients: ClassVar[bool] = False
    # Not annotated, so these are not fields: strategies with an axis or a warm-up make them knobs.
    #: Number of ranks on its axis; None takes those that the others leave.
    degree = None
    #: First steps that differ from those after them.
    warmup_steps = 0

    def wanted(self) -> dict[str, int | None]:
        """Returns the degree asked for on each axis; None takes what the other strategies leave."""
        return dict.fromkeys(self.axes, self.degree)

    def share(self, ranks: int) -> dict[str, int]:
        """Distributes `ranks` ranks over this strategy's axes without a degree of their own."""
        free = [axis for axis, degree in self.wanted().items() if degree is None]
        return {axis: ranks if position == 0 else 1 for position, axis in enumerate(free)}

    def attach(self, denoiser: Site, hooks: HookSet) -> Attachment | None:
        """Puts hooks on a denoiser's blocks, inside those that cut; returns None where it has none."""
        return None

    def stages(self, mesh: Mesh, clock: StepClock) -> Sequence[Stage]:
        """Returns the links this strategy adds to the chain of an attention over split tokens, outermost call first."""
        return ()

    def borders(self, axis: Axis, clock: StepClock) -> Borders | None:
        """Says how border rows and norms of an image cut into rows are exchanged; None leaves them fresh."""
        return None

    def refuses(self, adapter: Adapter) -> str | None:
        """Says why this strategy has no correct form on an architecture, and what to use; None where it has one."""
        if not set(self.axes) & set(TOKEN_AXES):
            return None
        if adapter.whole is not None:
            return f"{adapter.whole}; {adapter.instead}"
        if adapter.frames is not None and adapter.frames.mixers and not adapter.rows:
            return f"frames are a batch to it, not tokens of one sequence; {adapter.instead}"
        return None

    def composes(self, other: Strategy) -> bool:
        """Says whether it runs beside another strategy that works on the denoiser."""
        return not self.has_loop

    def rounds(self, mesh: Mesh) -> Rounds | None:
        """Returns how its own loop shares points of the trajectory out over ranks; None where it does not."""
        return None

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> Cut | None:
        """Returns a cut of the model that is not one over the mesh's token axes; None where there is none."""
        return None

    def shards(self, module: nn.Module, adapter: Adapter, mesh: Mesh, lent: Collection[nn.Module]) -> Shards | None:
        """Returns the shares of the model's weights that ranks hold; None where each holds all of them.

        Args:
            module: the model.
            adapter: its row.
            mesh: the ranks.
            lent: modules that another part of the pipeline calls by itself, such as a ControlNet with the model's
                own layers.
        """
        return None

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns the shares of a language model's weights that ranks hold; None where it runs on none.

        Args:
            model: of transformers.
            mesh: the ranks, of which there are several.
        """
        return None

    def codes(self, target: Any, mesh: Mesh) -> Coder | None:
        """Returns its work on a pipeline's autoencoder or text encoders; None where it does not touch them."""
        return None

    def stale(self) -> str | None:
        """Returns a line of `Plan.explain` about what is read stale; None if nothing is."""
        return None

    def rounded(self) -> str | None:
        """Returns a line of `Plan.explain` about what is sent in fewer bits; None if nothing is."""
        return None

    def unpredictable(self) -> str | None:
        """Says why shapes do not decide the bytes it moves, and what to set; None where they do."""
        return None

    def validate(self) -> None:
        """Refuses knob values out of bounds.

        Raises:
            ArgumentError: names the knob, the value and the legal ones.
        """
        check_fields(self)


def at_work(strategies: Sequence[Strategy], mesh: Mesh) -> list[Strategy]:
    """Returns the strategies that have more than one rank."""
    return [s for s in strategies if any(mesh.degrees[axis] > 1 for axis in (AXES if s.uses_all_ranks else s.axes))]


def refuse(strategies: tuple[Strategy, ...], adapter: Adapter, mesh: Mesh) -> None:
    """Refuses strategies without a correct form on an architecture, where they have more than one rank.

    Raises:
        UnsupportedError: names the strategy and the architecture, says why and what to use.
    """
    for strategy in at_work(strategies, mesh):
        reason = strategy.refuses(adapter)
        if reason is not None:
            raise UnsupportedError(f"{type(strategy).__name__} on {adapter.model}: {reason}")


def useful_shares(
    strategies: Sequence[Strategy], degrees: Mapping[str, int], shares: Sequence[float] | None
) -> Sequence[float] | None:
    """Returns the shares of ranks; None where they change nothing with these strategies."""
    uneven = tuple(axis for axis in AXES if any(axis in strategy.uneven_axes for strategy in strategies))
    return None if shares_along(uneven, degrees, shares) is None else shares


def refuse_shares(strategies: Sequence[Strategy], degrees: Mapping[str, int], shares: Sequence[float] | None) -> None:
    """Refuses shares of ranks that change nothing with these strategies.

    Raises:
        ArgumentError: names the shares and says what is cut into equal parts.
    """
    if shares is None or useful_shares(strategies, degrees, shares) is not None:
        return
    names = " and ".join(type(strategy).__name__ for strategy in strategies) or "a plan without strategies"
    used = [axis for axis in AXES if degrees[axis] > 1 and any(axis in s.uneven_axes for s in strategies)]
    why = f"{names} makes equal parts only"
    if used:
        why = f"only {' and '.join(used)} is cut unevenly, and all places along it have the same share"
    raise ArgumentError(
        f"shares=({', '.join(f'{share:g}' for share in shares)}) change nothing: {why}; leave them out, or cut tokens "
        "or rows over uneven ranks, with a strategy such as Ulysses"
    )


def mesh_for(strategies: Sequence[Strategy], world_size: int) -> dict[str, Any]:
    """Returns the mesh degrees that give each strategy its ranks.

    At most one strategy may leave its degree open, and it takes the ranks the others leave; `CfgParallel` leaves all
    but two when another one is open too. If a strategy uses all ranks whatever their axes, ranks left over become
    ``data`` ranks.

    Args:
        strategies: the strategies to compose; each axis may be used once.
        world_size: number of ranks.

    Returns:
        A degree for every axis, multiplying to `world_size`.

    Raises:
        ArgumentError: the degrees do not multiply to the number of ranks, or two strategies leave theirs open.
        UnsupportedError: two strategies want the same axis.
    """
    asked = check_strategies(strategies)
    degrees = dict.fromkeys(AXES, 1) | {axis: degree or 1 for axis, degree in asked.items()}
    _fill(degrees, [strategy for strategy in strategies if None in strategy.wanted().values()], world_size)
    taken = math.prod(degrees.values())
    if "data" not in asked and world_size % taken == 0 and any(strategy.uses_all_ranks for strategy in strategies):
        degrees["data"] = world_size // taken
    check_degrees(degrees, world_size)
    return degrees


def check_strategies(strategies: Sequence[Strategy]) -> dict[str, int | None]:
    """Refuses knobs out of bounds and strategies that do not compose, whatever their degrees.

    Returns:
        The degree that each axis is asked for; None where it is left open.

    Raises:
        ArgumentError: names the knob, or what is not a strategy.
        UnsupportedError: two strategies want the same axis, or do not run beside each other.
    """
    asked: dict[str, int | None] = {}
    owner: dict[str, str] = {}
    for strategy in strategies:
        name = type(strategy).__name__
        if not isinstance(strategy, Strategy):
            raise ArgumentError(f"{strategy!r} is not a strategy; pass instances such as Ulysses()")
        strategy.validate()
        for axis, degree in strategy.wanted().items():
            if axis in owner:
                raise UnsupportedError(f"{name} and {owner[axis]} both use the mesh axis {axis!r}; drop one of them")
            owner[axis], asked[axis] = name, degree
        others = [other for other in strategies if other is not strategy and other.denoises]
        clashing = [type(other).__name__ for other in others if not _compose(strategy, other)]
        if clashing:
            why = "has a loop of its own and " if strategy.has_loop else ""
            raise UnsupportedError(f"{name} {why}does not compose with {' and '.join(clashing)} yet; drop one")
    return asked


def _compose(strategy: Strategy, other: Strategy) -> bool:
    return strategy.composes(other) or (other.keeps_layers and not strategy.has_loop)


def _fill(degrees: dict[str, int], open_ones: list[Strategy], world_size: int) -> None:
    if len(open_ones) > 1:
        if world_size % 2 == 0 and any(strategy.axes == ("cfg",) for strategy in open_ones):
            degrees["cfg"] = 2
        open_ones = [strategy for strategy in open_ones if strategy.axes != ("cfg",)]
    if len(open_ones) > 1:
        names = " and ".join(type(strategy).__name__ for strategy in open_ones)
        raise ArgumentError(f"{names} leave their degree open; give a degree to all but one of them")
    taken = math.prod(degrees.values())
    if open_ones and world_size % taken == 0:
        degrees.update(open_ones[0].share(world_size // taken))


def combined_kind(strategies: Sequence[Strategy]) -> Kind:
    """Returns the class of a composition: that of its weakest part."""
    kinds = {strategy.kind for strategy in strategies}
    return "approximate" if "approximate" in kinds else "bounded" if "bounded" in kinds else "exact"


def own_loop(
    strategies: Sequence[Strategy], mesh: Mesh, target: Any, denoisers: Sequence[nn.Module]
) -> Strategy | None:
    """Returns the strategy whose own loop samples on this mesh; None where the pipeline's own call does.

    Raises:
        UnsupportedError: such a strategy is on a bare model, or on a pipeline with two denoisers.
    """
    for strategy in strategies:
        is_alone = all(mesh.degrees[axis] == 1 for axis in strategy.axes)
        if not strategy.has_loop or (is_alone and not strategy.loops_alone):
            continue
        name = type(strategy).__name__
        if not hasattr(target, "components") or not hasattr(target, "scheduler"):
            raise UnsupportedError(f"{name} runs the sampling loop itself: give it a pipeline with a scheduler")
        if len(denoisers) > 1:
            raise UnsupportedError(f"{name} knows one denoiser; {type(target).__name__} holds {len(denoisers)}")
        return strategy
    return None
