"""Checks an inferred row: the first call is computed serially too, and must agree on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partsong.errors import PartsongError, UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.hooks.samples import samples_of
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.mesh import Axis

__all__ = ["TOLERANCE", "verified"]

logger = logging.getLogger(__name__)

#: Largest relative difference that rounding can explain, per type.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}


def verified(
    everyone: Axis,
    alone: Callable[..., Any],
    adapter: Adapter,
    hooks: HookSet,
    named: dict[str, Any],
    shared: Callable[[dict[str, Any]], Any],
    *,
    tells: bool,
) -> Any:
    """Makes a call under hooks and compares it with the same call without them.

    Args:
        everyone: all ranks; they reach the same verdict.
        alone: calls the model with arguments by name.
        adapter: the row.
        hooks: what to lift for the serial call.
        named: the arguments of the call.
        shared: makes the call under hooks.
        tells: whether to say that a row was inferred.

    Returns:
        The output of the call under hooks.

    Raises:
        UnsupportedError: the call under hooks fails, or the two differ by more than rounding on some rank.
    """
    name, (wrong, instead) = adapter.model, _words(adapter)
    try:
        output = shared(named)
    except PartsongError:
        raise
    except Exception as problem:
        # The layer's own error is chained below; the user needs to know what to do.
        raise UnsupportedError(
            f"{wrong}: a layer cannot compute with a part of the {'input' if adapter.whole else 'tokens'} "
            f"({type(problem).__name__}); {instead}"
        ) from problem
    with hooks.lifted():
        expected = samples_of(alone(**named))
    if not expected:
        raise UnsupportedError(f"{name} returns {type(output).__name__}, in which no sample is found; return a tensor")
    pairs = zip(samples_of(output), expected, strict=True)
    apart = max(_difference(got, want) for got, want in pairs)
    worst = max(row[0] for row in agree(everyone, [apart], name="check of an inferred row"))
    allowed = TOLERANCE.get(expected[0].dtype, TOLERANCE[torch.float16])
    if not worst <= allowed:
        raise UnsupportedError(
            f"{wrong}: its first call differs from one rank's by {worst:.1e} where rounding explains {allowed:.0e}; "
            f"{instead}"
        )
    if everyone.index == 0 and adapter.inferred and tells:
        logger.warning(
            "%s has no row: one was inferred, and its first call agrees with one rank's to %.1e", name, worst
        )
    return output


def _words(adapter: Adapter) -> tuple[str, str]:
    """Says which row is wrong, and what to do instead."""
    wrong = f"the adapter given for {adapter.model} is wrong"
    if adapter.inferred:
        wrong = f"{adapter.model} has no row, and the one inferred from its structure is wrong"
    is_whole = adapter.whole is not None
    return wrong, "give parallelize() a row with adapter=" if is_whole else "use CfgParallel or DataParallel"


def _difference(sample: Tensor, expected: Tensor) -> float:
    if sample.shape != expected.shape:
        return float("inf")
    apart = (sample.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    # NaN would pass any comparison of maxima.
    return apart.item() if bool(torch.isfinite(apart)) else float("inf")
