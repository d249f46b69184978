"""Lists every mix of strategies that could run a model on a number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from partsong.parallel.strategy import Strategy
from partsong.planner.subject import Subject
from partsong.samplers.registry import (
    BUILT_IN,
    CfgParallel,
    DataParallel,
    DisplacedPatch,
    DraftedSteps,
    EncodeOnce,
    ParallelVae,
    Ring,
    ShardedWeights,
    StepCache,
    TensorParallel,
    TimeParallel,
    Ulysses,
)

__all__ = ["mixes_for"]

#: Strategies that take ranks of their own; each with what it leaves may be one part of a mix.
_ONE_AXIS = tuple(row.strategy for row in BUILT_IN if row.planned)
#: Pairs that share the ranks of a call, the one with the dearer exchange second, where links are fast.
_PAIRS = ((Ring, Ulysses), (Ulysses, TensorParallel), (Ring, TensorParallel), (DisplacedPatch, TensorParallel))
#: Loops over points of the trajectory, and how many points fill a number of ranks.
_WINDOWS = (2, 4)


def mixes_for(subject: Subject, ranks: int, batch: int, *, exact: bool) -> Iterator[tuple[Strategy, ...]]:
    """Yields the mixes, which may still be refused by the model or by its size.

    Args:
        subject: the model.
        ranks: how many there are.
        batch: pictures that are made at once.
        exact: whether all others are left out.
    """
    for mix in _placed(subject, ranks, batch):
        if exact and any(strategy.kind != "exact" for strategy in mix):
            continue
        yield (*mix, *_beside(mix, subject, ranks))
        takes_tokens = [strategy for strategy in mix if not strategy.has_loop and not strategy.cuts_weights]
        if takes_tokens and len(takes_tokens) == len(mix) and not any(s.kind == "approximate" for s in mix):
            yield (*mix, ShardedWeights(), *_beside(mix, subject, ranks))
            if not exact:
                yield (*mix, StepCache(), *_beside(mix, subject, ranks))


def _placed(subject: Subject, ranks: int, batch: int) -> Iterator[tuple[Strategy, ...]]:
    """Yields what places a call on the ranks: branches of guidance and samples first, tokens and layers on the rest."""
    if ranks == 1:
        yield ()
        return
    for samples in _divisors(math.gcd(batch, ranks)):
        for guided in {1, min(2, subject.branches)}:
            if ranks % (samples * guided):
                continue
            outer: tuple[Strategy, ...] = (CfgParallel(degree=guided),) if guided > 1 else ()
            outer += (DataParallel(degree=samples),) if samples > 1 else ()
            yield from _inside(outer, ranks // (samples * guided))


def _inside(outer: tuple[Strategy, ...], left: int) -> Iterator[tuple[Strategy, ...]]:
    if left == 1:
        yield outer
        return
    for kind in _ONE_AXIS:
        yield (*outer, kind(degree=left))  # type: ignore[call-arg] - a strategy with one axis has this knob
    for first, second in _PAIRS:
        for degree in _divisors(left)[1:-1]:
            yield (*outer, first(degree=left // degree), second(degree=degree))
    for window in _WINDOWS:
        if left % window == 0:
            rest: tuple[Strategy, ...] = () if left == window else (Ulysses(degree=left // window),)
            yield (TimeParallel(degree=window, window=window), *outer, *rest)
            yield (DraftedSteps(degree=window, depth=window), *outer, *rest)


def _beside(mix: Sequence[Strategy], subject: Subject, ranks: int) -> tuple[Strategy, ...]:
    """Returns what costs nothing to add on several ranks: it divides work that every rank would otherwise repeat."""
    if ranks == 1:
        return ()
    coders: tuple[Strategy, ...] = () if subject.coder is None else (ParallelVae(),)
    return (*coders, EncodeOnce()) if subject.encoders else coders


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]
