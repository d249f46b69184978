"""Solves for several steps of a denoising trajectory at the same time, each on a rank of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.ranks.mesh import Axis, Mesh
from partsong.parallel.strategy import Kind, Rounds, Strategy

__all__ = ["DraftedSteps", "TimeParallel", "TimePoints"]

_LIST, _TWO = "its pipelines give it a list of latents", "it returns two samples, and one is solved for here"
#: Models whose pipelines call them in ways that cannot be learned. With others, scheduler and guidance decide.
_REFUSED = {
    "Cosmos3OmniTransformer": _LIST,
    "ZImageTransformer2DModel": _LIST,
    "Kandinsky6Transformer3DModel": _TWO,
    "LTX2VideoTransformer3DModel": _TWO,
    "PriorTransformer": "what it returns is no sample",
    "RFD4ProteinaTransformer": "its pipeline has no scheduler",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _OverTime(Strategy):
    """Shares the points of a trajectory out over ranks.

    Args:
        degree: ranks that share them; None takes all ranks that are left.
    """

    axes: ClassVar[tuple[str, ...]] = ("time",)
    has_loop: ClassVar[bool] = True
    loops_alone: ClassVar[bool] = True

    degree: Count | None = None

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models that return or are given something other than one tensor."""
        reason = _REFUSED.get(adapter.model)
        return None if reason is None else f"{reason}; {adapter.instead}"

    def composes(self, other: Strategy) -> bool:
        """Says that strategies which split one call exactly run beside it."""
        return other.kind == "exact" and not other.has_loop

    def rounds(self, mesh: Mesh) -> TimePoints:
        """Returns which rank evaluates which point."""
        return TimePoints(mesh.axis("time"), mesh.world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeParallel(_OverTime):
    """Guesses the latents of the next steps, evaluates the model at all of them at once, and keeps the steps that hold.

    A trajectory is right when every point is the step from its predecessor. In each round the model is evaluated at a
    window of guesses, every step is taken again with the results, and the window moves past the points that changed by
    at most `tolerance`. At least one point settles in a round, so there are at most as many rounds as
    steps. The result is the same on any number of ranks, to the last bit: it depends only on `window` and `tolerance`.
    With `tolerance=0` it is that of one step after the other, up to rounding.

    Bounded: `Plan.explain` names the largest change that was accepted. Sample with `partsong.samplers.generate`. Steps
    are made by copies of the pipeline's own scheduler. Guidance must be a weighted sum.

    Use it when links are slow, there are ranks to spare, and the largest accepted change must be known.

    Args:
        degree: ranks that share the points of a window; None takes all ranks that are left.
        window: points in a round.
        tolerance: how much a point may still change, as a root mean square over a sample's latents, which start at
            1. 0 waits until points repeat themselves to the last bit.

    Source: ParaDiGMS, arXiv 2305.16317; here guesses ahead are extrapolated.

    Example:
        >>> TimeParallel(window=4).wanted()
        {'time': None}
    """

    kind: ClassVar[Kind] = "bounded"

    window: Count = 4
    tolerance: Annotated[float, Number(0)] = 0.05

    def unpredictable(self) -> str | None:
        """Says that the number of rounds depends on the picture."""
        return "how many rounds it takes depends on the picture; sample once and ask explain()"


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedSteps(_OverTime):
    """Drafts the latents of the next steps with the last prediction, and evaluates the model at all drafts at once.

    It is one unchecked sweep of `TimeParallel`: `depth` steps are taken in a round, each with the prediction
    at its draft. Approximate; `depth=1` is the pipeline's own loop, and so is a warm-up of all steps. Sample with
    `partsong.samplers.generate`. The schedulers and guidance it takes are those of `TimeParallel`.

    Use it when links are slow and there are so many steps that neighbouring predictions hardly differ.

    Args:
        degree: ranks that share the drafts; None takes all ranks that are left.
        depth: steps in a round.
        warmup_steps: first steps that are taken one by one.
        check: how much a draft may still change when its step is taken. It makes this `TimeParallel` with a window of
            `depth` and this tolerance, which is bounded, and needs no warm-up. None checks nothing.

    Source: DRiffusion, arXiv 2603.25872; ParaStep, arXiv 2505.14741.

    Example:
        >>> DraftedSteps(depth=2).wanted()
        {'time': None}
    """

    depth: Count = 2
    warmup_steps: Annotated[int, Whole(0)] = 0
    check: Annotated[float, Number(0)] | None = None

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Says that it is bounded where drafts are checked, and otherwise approximate."""
        return "approximate" if self.check is None else "bounded"

    def validate(self) -> None:
        """Refuses a warm-up beside a check."""
        super(DraftedSteps, self).validate()
        if self.check is not None and self.warmup_steps:
            raise ArgumentError(
                f"DraftedSteps: warmup_steps={self.warmup_steps}, check={self.check}; a check finds out for itself "
                "which steps need more than one round, so leave warmup_steps at 0"
            )

    def stale(self) -> str | None:
        """Says what is not evaluated where it is used."""
        if self.check is not None:
            return None
        return f"{self.depth} steps at a time read the prediction at a draft of their latents"


class TimePoints(Rounds):
    """Distributes the points of every round over the ranks, and records the rounds.

    Args:
        axis: the ranks that share them.
        num_ranks: all ranks of the mesh.
    """

    def __init__(self, axis: Axis, num_ranks: int) -> None:
        self.axis, self.num_ranks = axis, num_ranks
        self.rounds: list[list[int]] = []
        self.num_steps = 0
        self.residual = 0.0
        self.point_bytes = self.number_bytes = 0
        #: Findings of the last generation's rehearsal, and the number of generations.
        self.findings: Any = None
        self.generations = 0

    def points_of(self, rank: int, num: int) -> range:
        """Lists the points that a rank evaluates in a round of `num` points."""
        return range(rank, num, self.axis.size)

    def begin(self, num_steps: int, point_bytes: int) -> None:
        """Begins a generation of some steps, with predictions of some size."""
        self.rounds, self.num_steps, self.point_bytes, self.residual = [], num_steps, point_bytes, 0.0

    def steps_of(self, number: int, index: int) -> list[int]:
        """Lists the steps that start at a rank's points of a round; the very first is evaluated by every rank."""
        if number == 0:
            return [0]
        steps = self.rounds[number] if number < len(self.rounds) else []
        return [steps[place] for place in self.points_of(index, len(steps))]

    def predict(self, number: int, index: int) -> int:
        """Returns the bytes a rank sends in a round, besides those of its evaluations."""
        num = len(self.rounds[number]) if number < len(self.rounds) else 0
        first = 0 if number else self.number_bytes * (self.num_ranks - 1)
        return first + len(self.points_of(index, num)) * self.point_bytes * (self.axis.size - 1)

    def describe(self) -> str:
        """Says what is shared."""
        return f"up to {max(map(len, self.rounds), default=0)} of {self.num_steps} steps at a time"

    def kept(self) -> str:
        """Says how many rounds there were, and what was accepted."""
        accepted = f"; the largest change that was accepted: {self.residual:.2g}" if self.residual else ""
        return f"{len(self.rounds)} rounds for {self.num_steps} steps{accepted}"
