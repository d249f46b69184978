"""Traces a model at any size that is asked for, and says why one cannot be made."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from typing import Any

from partsong.errors import PartsongError, UnsupportedError
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.planner.calls import Size
from partsong.planner.steps import TracedSteps, Tracer
from partsong.planner.subject import Subject
from partsong.planner.trace import blocks_are_equal
from partsong.samplers.registry import parse_strategy
from partsong.serving.ranks.reach import Asked, Failure
from partsong.serving.ranks.shape_calls import ShapeCalls

__all__ = ["TracedSizes"]

_log = logging.getLogger(__name__)

#: Sizes whose traces are kept.
_KEPT = 64
#: Stands for the size of a subject that has one call.
_ANY = Size(height=1, width=1)


class TracedSizes:
    """Holds the traces of one model by what is asked of it.

    Args:
        subject: the model; its call is one of the usual size.
        usual: that size.
        calls: makes the calls of other sizes; None where the pipeline cannot be called in shapes.
        ranks: how many there are.
        fused: whether they are GPUs, as for `Tracer`.
    """

    def __init__(self, subject: Subject, usual: Asked, calls: ShapeCalls | None, ranks: int, *, fused: bool) -> None:
        self._subject, self._usual, self._calls = subject, usual, calls
        self._ranks, self._fused = ranks, fused
        self._inputs: dict[Asked, dict[str, Any] | Exception] = {}
        self._tracers: dict[Asked, Tracer] = {}
        self._traces: dict[tuple[tuple[str, ...], Asked], TracedSteps | Exception] = {}

    @functools.cached_property
    def knows_all(self) -> bool:
        """Says whether any size can be traced, and not only the usual one; found out when it is first asked for."""
        if self._calls is not None and isinstance(error := self._traced((), self._usual), Exception):
            _log.info("%s cannot be tried in shapes: %s", self._subject.name, error)
            self._calls = None
            self._forget()
        subject = self._subject
        if self._calls is not None:
            uniform = blocks_are_equal(subject.denoiser, subject.call(_ANY), RememberedShapes())
            self._subject = replace(subject, uniform=uniform)
        return self._calls is not None

    def trace(self, names: tuple[str, ...], asked: Asked) -> TracedSteps | None:
        """Returns the trace of a mix of strategies; None where it cannot be traced."""
        traced = self._traced(names, asked)
        return None if isinstance(traced, Exception) else traced

    def failure(self, asked: Asked) -> Failure | None:
        """Returns why the model cannot make something on one rank; None where it can, or where shapes do not say."""
        if not self.knows_all:
            return None
        called = self._called(asked)
        return _failure(called if isinstance(called, Exception) else self._traced((), asked))

    def refusal(self, names: tuple[str, ...], asked: Asked) -> str | None:
        """Returns why a mix of strategies refuses a size; None where it does not, or refuses the usual one too."""
        traced = self._traced(names, asked)
        if not isinstance(traced, PartsongError) or traced.__cause__ is not None:
            return None
        return None if isinstance(self._traced(names, self._usual), Exception) else str(traced)

    def _traced(self, names: tuple[str, ...], asked: Asked) -> TracedSteps | Exception:
        # How many steps follow changes nothing in the first, and an unknown size is taken for the usual one.
        asked = self._usual if self._calls is None else asked._replace(steps=self._usual.steps)
        if (names, asked) not in self._traces:
            self._traces[names, asked] = self._trace(names, asked)
        return self._traces[names, asked]

    def _trace(self, names: tuple[str, ...], asked: Asked) -> TracedSteps | Exception:
        called = self._called(asked)
        if isinstance(called, Exception):
            return called
        if asked not in self._tracers:
            size = Size(height=asked.height, width=asked.width, frames=asked.frames, dtype=self._subject.dtype)
            subject = replace(self._subject, call=lambda size: called)
            self._tracers[asked] = Tracer(subject, size, fused=self._fused)
        mix = [strategy for strategy in map(parse_strategy, names) if strategy.denoises]
        try:
            return self._tracers[asked].trace(mix, self._ranks if names else 1, 1)
        except Exception as error:  # noqa: BLE001 - models of other libraries fail in any way
            return error

    def _called(self, asked: Asked) -> dict[str, Any] | Exception:
        """Returns the arguments of the first call of the denoiser, or what the pipeline raised before it."""
        if self._calls is None:
            return self._subject.call(_ANY)
        if asked not in self._inputs:
            if len(self._inputs) > _KEPT:
                self._forget()
            try:
                self._inputs[asked] = self._calls.of(asked)
            except Exception as error:  # noqa: BLE001 - so do pipelines
                self._inputs[asked] = error
        return self._inputs[asked]

    def _forget(self) -> None:
        for kept in (self._inputs, self._tracers, self._traces):
            kept.clear()


def _failure(traced: Any) -> Failure | None:
    if not isinstance(traced, Exception):
        return None
    error: BaseException = traced.__cause__ or traced if isinstance(traced, UnsupportedError) else traced
    words = str(error).partition("\n")[0]
    if isinstance(error, NotImplementedError) or re.search(r"\b[Mm]eta\b", words):
        return None  # torch says so where an operator needs values, and shapes cannot tell
    return Failure(words if isinstance(error, ValueError | PartsongError) else "")
